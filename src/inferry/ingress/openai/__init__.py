"""The OpenAI API: requests to jobs, items to responses."""
