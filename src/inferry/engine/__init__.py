"""The embedded engine: token ids in, token ids out, batched continuously."""
