"""Stores of the ledger."""
