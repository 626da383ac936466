"""Keys of full blocks: each one stands for a salt, an adapter and every token up to the end of its block.

The chain starts from the salt and the adapter, so that blocks with equal tokens and different salts or adapters have
different keys. The hash is cryptographic: a prompt cannot be made to match the blocks of another one.
"""

from array import array
from collections.abc import Sequence as Ordered
from hashlib import blake2b

_BYTES = 16


def root_key(salt: str | None, adapter: int = 0) -> bytes:
    """The start of a chain. Sequences without a salt share one, and so do those without an adapter (0)."""
    start = blake2b(b"" if salt is None else b"=" + salt.encode(), digest_size=_BYTES).digest()
    return next_key(start, [adapter]) if adapter else start


def next_key(parent: bytes, tokens: Ordered[int]) -> bytes:
    """The key of a block of `tokens` after the block (or the root) with the key `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=_BYTES).digest()
