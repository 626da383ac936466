"""Ids of stored objects."""

import secrets


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return prefix + secrets.token_hex(12)
