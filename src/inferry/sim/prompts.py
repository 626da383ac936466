"""Prompts as what they share, not as text: pieces of named segments, and the block hashes an engine would see."""

from collections.abc import Sequence

Piece = tuple[int, int, int]
"""Segment, first token in it, number of tokens. Equal pieces are equal tokens; different segments share nothing."""


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


def block_hashes(pieces: Sequence[Piece], block_tokens: int, salt: int = 0) -> tuple[int, ...]:
    """One hash per full block, chained: equal hashes mean equal salt and equal tokens from the beginning on.

    Only integers are hashed, which Python does alike in every process.
    """
    hashes: list[int] = []
    chain = hash((salt, block_tokens))
    rest: tuple[int, ...] = ()
    missing = block_tokens
    for segment, first, count in pieces:
        start, stop = first, first + count
        while stop - start >= missing:
            chain = hash((chain, *rest, segment, start, missing))
            hashes.append(chain)
            start += missing
            rest, missing = (), block_tokens
        if start < stop:
            rest = (*rest, segment, start, stop - start)
            missing -= stop - start
    return tuple(hashes)
