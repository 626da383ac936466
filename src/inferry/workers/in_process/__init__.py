"""Engines run as child processes: the embedded engine and vLLM."""
