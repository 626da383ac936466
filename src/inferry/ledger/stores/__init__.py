"""Ledgers: where entries are kept."""
