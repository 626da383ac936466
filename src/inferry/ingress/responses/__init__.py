"""OpenAI's Responses API: requests to chat requests, answers to responses, stored and background responses."""
