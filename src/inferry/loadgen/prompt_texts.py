"""Prompts as bytes on the wire. Equal pieces become equal tokens; prompts with different salts share nothing.

Every token has the same width in bytes, so a piece of a segment is a slice of its bytes. A segment is generated from an
extendable hash, so its content does not depend on the order or size of requests for it.
"""

from collections.abc import Sequence
from hashlib import shake_256

from inferry.sim.prompts import Piece

CACHE_BYTES = 64_000_000
"""Size of the cache of segments: shared prefixes are generated once."""

# Ids that every vocabulary has and that are not special tokens.
_IDS = tuple(b"%d," % (100 + number) for number in range(256))
_WORDS = tuple(
    f"{first}{vowel}{last}{end} ".encode()
    for first in "bdfgklmn"
    for vowel in "aeiu"
    for last in "prst"
    for end in "ao"
)


class PromptTexts:
    """Segments as token ids in JSON, or as words; `words_per_token` None: ids."""

    def __init__(self, salt: str, words_per_token: float | None = None) -> None:
        self._salt = salt
        self._table = _IDS if words_per_token is None else _WORDS
        self._width = len(self._table[0])
        self._per_token = words_per_token or 1.0
        self._cache: dict[int, bytes] = {}
        self._cached_bytes = 0

    def prompt(self, pieces: Sequence[Piece]) -> bytes:
        """The content between the brackets (ids) or the quotes (text)."""
        return b"".join([self._piece(*piece) for piece in pieces])[:-1]

    def _piece(self, segment: int, start: int, count: int) -> bytes:
        first, last = round(start * self._per_token), max(1, round((start + count) * self._per_token))
        known = self._cache.get(segment, b"")
        if len(known) < last * self._width:
            self._cached_bytes -= len(known)
            chosen = shake_256(f"{self._salt}/{segment}".encode()).digest(last)
            known = self._cache[segment] = b"".join(map(self._table.__getitem__, chosen))
            self._cached_bytes += len(known)
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                oldest = next(iter(self._cache))
                self._cached_bytes -= len(self._cache.pop(oldest))
        return known[first * self._width : last * self._width]
