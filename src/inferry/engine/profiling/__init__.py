"""Profiles steps of the embedded engine by batch size."""
