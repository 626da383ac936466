"""Identical calls share one execution."""
