"""Clients of the batch APIs of hosted providers."""
