"""The embedded engine: token ids in, token ids out, with continuous batching."""
