"""Workers behind an OpenAI-compatible HTTP server."""
