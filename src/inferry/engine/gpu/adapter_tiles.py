"""Groups the rows of a step by adapter, in tiles of rows that share one. Independent of torch."""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferry.engine.planner import Work

Ints = NDArray[np.int32]

DECODE_TILE = 16
"""Rows of a tile in a step of single tokens: the smallest that tensor cores take."""
CHUNK_TILE = 64
"""Rows of a tile in a step with prompt chunks."""


def tile_rows(has_chunks: bool) -> int:
    return CHUNK_TILE if has_chunks else DECODE_TILE


def max_tiles(rows: int, adapters: int, has_chunks: bool) -> int:
    """The most tiles that a step of `rows` rows can have: each adapter has at most one that is not full."""
    return min(rows, rows // tile_rows(has_chunks) + adapters)


class AdapterTiles(NamedTuple):
    """`rows` with an adapter, those of one adapter together. By tile: its adapter's slot, its first place in `rows`,
    and how many rows it has.
    """

    rows: Ints
    slots: Ints
    starts: Ints
    counts: Ints


def adapter_tiles(pieces: Ordered[Work], slot_of: Mapping[int, int]) -> AdapterTiles | None:
    """The tiles of a step with these pieces, in the order of its rows; None if no piece has an adapter."""
    if not any(piece.sequence.adapter for piece in pieces):
        return None
    tokens = [piece.tokens for piece in pieces]
    # Numbers of 16 bits are sorted by radix.
    slots = np.array([slot_of.get(piece.sequence.adapter, -1) for piece in pieces], dtype=np.int16)
    by_row = np.repeat(slots, tokens)
    order = np.argsort(by_row, kind="stable")
    present, firsts, counts = np.unique(by_row[order], return_index=True, return_counts=True)
    without = int(counts[0]) if present[0] < 0 else 0
    used = slice(1 if without else 0, None)
    size = tile_rows(max(tokens) > 1)
    tiles = -(-counts[used] // size)
    within = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    starts = np.repeat(firsts[used] - without, tiles) + within * size
    ends = np.repeat(firsts[used] - without + counts[used], tiles)
    return AdapterTiles(
        order[without:].astype(np.int32),
        np.repeat(present[used], tiles).astype(np.int32),
        starts.astype(np.int32),
        np.minimum(ends - starts, size).astype(np.int32),
    )
