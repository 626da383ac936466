"""Predictions: output length, wait, prefix hits, token counts."""
