"""Open-loop load tests of any OpenAI-compatible server, and the calibration of engine models."""
