"""Accounts: the recorder that keeps the ledger off the hot path."""
