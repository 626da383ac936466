"""Several gateway processes: the link between them."""
