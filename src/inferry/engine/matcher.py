"""Matches the output of a sequence against its grammar."""

from typing import Any


class Matcher:
    """The state of a sequence's grammar: which tokens may come next."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, address: int, size: int) -> None:
        """Write one bit per token to `size` bytes at `address`: 1 for the tokens that may come next."""
        self._matcher.unsafe_compute_mask_ptr(address, size)

    def consume(self, token: int) -> bool:
        """Advance by a token; False where the grammar does not allow it, or has become too complex."""
        return bool(self._matcher.consume_token(token))

    @property
    def is_complete(self) -> bool:
        """Whether no token but an end token may come next."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy())
