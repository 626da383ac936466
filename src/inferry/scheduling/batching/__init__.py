"""Which jobs go together: batching windows, prefix groups and packing."""
