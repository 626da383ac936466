"""Workers: what runs plans."""
