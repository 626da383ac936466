"""Ids of stored objects."""

import secrets
import time


def new_id(prefix: str) -> str:
    """An id that cannot be guessed. It begins with the time, so that rows created together are neighbours in indexes:
    with random ids each row of a large table touches pages of its own.
    """
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(12)}"
