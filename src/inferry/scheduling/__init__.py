"""Who goes next, with whom, and where: pure and synchronous."""
