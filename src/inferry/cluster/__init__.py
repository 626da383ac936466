"""Several gateway processes: the link between them, shared limits, ownership and cancelled runs."""
