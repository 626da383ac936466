"""Inferry: the inference gateway and scheduler for fleets of LLM agents."""

from inferry._version import __version__

__all__ = ["__version__"]
