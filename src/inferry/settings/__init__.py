"""Versions of the settings: what may differ between runs, how two versions compare, when one is rolled back. Pure."""
