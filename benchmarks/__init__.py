"""The experiments behind the figures in the docs. Not installed."""
