"""Open-loop load against any OpenAI-compatible server, and what came of it."""
