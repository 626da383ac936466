"""HTTP in, HTTP out: wire shapes become jobs, items become responses."""
