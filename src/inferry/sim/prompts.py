"""Prompts as pieces of named segments, which say what prompts share, and the block hashes of an engine."""

from collections.abc import Sequence

Piece = tuple[int, int, int]
"""(segment, offset, number of tokens). Equal pieces are equal tokens; different segments share no tokens."""


def length(pieces: Sequence[Piece]) -> int:
    return sum([piece[2] for piece in pieces])


def tail(pieces: Sequence[Piece], tokens: int) -> tuple[Piece, ...]:
    """The last `tokens` tokens."""
    drop = length(pieces) - tokens
    if drop <= 0:
        return tuple(pieces)
    kept: list[Piece] = []
    for segment, start, count in pieces:
        cut = min(drop, count)
        drop -= cut
        if count > cut:
            kept.append((segment, start + cut, count - cut))
    return tuple(kept)


_State = tuple[int, tuple[int, ...], int, int]
"""State after some pieces: the hash chain, the incomplete block and its missing tokens, and the blocks so far."""


def block_hashes(pieces: Sequence[Piece], block_tokens: int, salt: int = 0) -> tuple[int, ...]:
    """One hash per full block, chained: equal hashes mean equal salt and equal tokens from the start.

    Only integers are hashed: their hashes are the same in every process.
    """
    return GrowingPrompt(block_tokens, salt).block_hashes(pieces)


class GrowingPrompt:
    """The prompts of one run, in order. The prefix shared with the previous prompt is not hashed again."""

    __slots__ = ("_block_tokens", "_hashes", "_pieces", "_states")

    def __init__(self, block_tokens: int, salt: int = 0) -> None:
        self._block_tokens = block_tokens
        self._pieces: Sequence[Piece] = ()
        self._hashes: list[int] = []
        self._states: list[_State] = [(hash((salt, block_tokens)), (), block_tokens, 0)]

    def block_hashes(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """As the function of that name."""
        common = 0
        for old, new in zip(self._pieces, pieces, strict=False):
            if old != new:
                break
            common += 1
        states, hashes = self._states, self._hashes
        del states[common + 1 :]
        chain, rest, missing, blocks = states[common]
        del hashes[blocks:]
        block = self._block_tokens
        for segment, start, count in pieces[common:]:
            stop = start + count
            if rest and stop - start >= missing:
                chain = hash((chain, *rest, segment, start, missing))
                hashes.append(chain)
                start += missing
                rest, missing = (), block
            if not rest:
                while stop - start >= block:
                    chain = hash((chain, segment, start, block))
                    hashes.append(chain)
                    start += block
            if start < stop:
                rest = (*rest, segment, start, stop - start)
                missing -= stop - start
            states.append((chain, rest, missing, len(hashes)))
        self._pieces = pieces
        return tuple(hashes)
