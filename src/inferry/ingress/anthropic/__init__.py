"""The Anthropic Messages API: requests to chat requests, items to messages."""
