"""Which job goes next, with which others, and to which worker: pure and synchronous."""
