"""Arranges the pieces of a step as one array of int32, copied to the device in one transfer. Independent of torch."""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from inferry.engine.gpu.adapter_tiles import adapter_tiles, max_tiles
from inferry.engine.planner import Work

Ints = NDArray[np.int32]

ROWS, DECODES, TILES, LAST_ROWS, ADAPTER_TILES = range(5)
"""Indexes into the counts of a step."""

_ALIGNED = 64
"""Sections start at multiples of this many values: kernels load aligned addresses faster."""


@dataclass(frozen=True)
class Capacity:
    """Upper limits of a step, and how queries are cut into tiles of `tile_queries`. `adapters`: loaded at once."""

    rows: int
    pieces: int
    blocks: int
    tile_queries: int
    block_tokens: int
    adapters: int = 0

    def tiles(self, rows: int) -> int:
        """The most tiles that chunks of together `rows` rows can have. A chunk has at least two rows."""
        return rows // self.tile_queries + min(self.pieces, rows // 2)


@dataclass(frozen=True)
class Sections:
    """The sections of the array, in host memory or on the device.

    `counts`: real rows, single-token pieces, tiles, last rows. By piece, single tokens first: `starts` (first row, and
    the end after the last piece), `computed` (tokens in the cache before the step), `table_starts` (first entry in
    `tables`). `tile_pieces` and `tile_firsts`: piece and first query of each tile. `codes`: token ids; a negative code
    -1 - i is the i-th token sampled by the previous step. `row_pieces`: the piece of each row. `adapter_…`: see
    `AdapterTiles`.
    """

    counts: Ints
    starts: Ints
    computed: Ints
    table_starts: Ints
    last_rows: Ints
    tile_pieces: Ints
    tile_firsts: Ints
    codes: Ints
    row_pieces: Ints
    adapter_rows: Ints
    adapter_slots: Ints
    adapter_starts: Ints
    adapter_counts: Ints
    tables: Ints


def section_lengths(capacity: Capacity) -> dict[str, int]:
    """Lengths of the sections, padded, in their order."""
    tiles = max_tiles(capacity.rows, capacity.adapters, has_chunks=False) if capacity.adapters else 0
    lengths = {
        "counts": 5,
        "starts": capacity.pieces + 1,
        "computed": capacity.pieces,
        "table_starts": capacity.pieces,
        "last_rows": capacity.pieces,
        "tile_pieces": capacity.tiles(capacity.rows),
        "tile_firsts": capacity.tiles(capacity.rows),
        "codes": capacity.rows,
        "row_pieces": capacity.rows,
        "adapter_rows": capacity.rows if capacity.adapters else 0,
        **dict.fromkeys(("adapter_slots", "adapter_starts", "adapter_counts"), tiles),
        "tables": capacity.blocks,
    }
    return {name: -(-length // _ALIGNED) * _ALIGNED for name, length in lengths.items()}


def host_sections(capacity: Capacity, array: Ints) -> Sections:
    """Views of `array`, which has the sum of all section lengths."""
    views: dict[str, Ints] = {}
    at = 0
    for name, length in section_lengths(capacity).items():
        views[name] = array[at : at + length]
        at += length
    return Sections(**views)


@dataclass(frozen=True)
class Packed:
    """What the host needs to know of a packed step.

    `pieces` are in the order of rows; `ending` are those for which a token is sampled, in the order of their last
    rows; `used` is the number of values to copy.
    """

    pieces: list[Work]
    ending: list[Work]
    rows: int
    decodes: int
    tiles: int
    used: int
    adapter_tiles: int = 0


def pack(
    work: Ordered[Work],
    capacity: Capacity,
    into: Sections,
    sampled_at: Mapping[int, int],
    slot_of: Mapping[int, int] | None = None,
) -> Packed:
    """Fill the sections for a step. `sampled_at`: by key, the index of a token sampled by the previous step. `slot_of`:
    the slots of loaded adapters.
    """
    singles = [piece for piece in work if piece.tokens == 1]
    chunks = [piece for piece in work if piece.tokens > 1]
    pieces = [*singles, *chunks]
    decodes, rows = len(singles), sum(piece.tokens for piece in pieces)
    tiles = _pack_tiles(chunks, decodes, capacity.tile_queries, into)
    counts = [piece.tokens for piece in pieces]
    into.starts[0] = 0
    np.cumsum(counts, out=into.starts[1 : len(pieces) + 1])
    into.computed[: len(pieces)] = [piece.sequence.computed for piece in pieces]
    into.row_pieces[:rows] = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
    into.codes[:decodes] = [_code(piece, sampled_at) for piece in singles]
    at = decodes
    for piece in chunks:
        sequence, first = piece.sequence, piece.sequence.computed
        into.codes[at : at + piece.tokens] = sequence.tokens[first : first + piece.tokens]
        at += piece.tokens
        if into.codes[at - 1] < 0:
            into.codes[at - 1] = -1 - sampled_at[sequence.key]
    blocks = _pack_tables(pieces, capacity.block_tokens, into)
    last = [
        index
        for index, piece in enumerate(pieces)
        if piece.tokens == piece.sequence.pending and not piece.sequence.is_pooled
    ]
    ending = [pieces[index] for index in last]
    into.last_rows[: len(last)] = into.starts[1:][last] - 1
    adapters = _pack_adapters(pieces, slot_of, into) if slot_of else 0
    into.counts[:5] = rows, decodes, tiles, len(last), adapters
    lengths = section_lengths(capacity)
    return Packed(pieces, ending, rows, decodes, tiles, sum(lengths.values()) - lengths["tables"] + blocks, adapters)


def _code(piece: Work, sampled_at: Mapping[int, int]) -> int:
    sequence = piece.sequence
    token = sequence.tokens[sequence.computed]
    return token if token >= 0 else -1 - sampled_at[sequence.key]


def _pack_tiles(chunks: list[Work], first_piece: int, tile_queries: int, into: Sections) -> int:
    at = 0
    for index, piece in enumerate(chunks, first_piece):
        count = -(-piece.tokens // tile_queries)
        into.tile_pieces[at : at + count] = index
        into.tile_firsts[at : at + count] = np.arange(count, dtype=np.int32) * tile_queries
        at += count
    return at


def _pack_adapters(pieces: list[Work], slot_of: Mapping[int, int], into: Sections) -> int:
    found = adapter_tiles(pieces, slot_of)
    if found is None:
        return 0
    into.adapter_rows[: len(found.rows)] = found.rows
    count = len(found.slots)
    into.adapter_slots[:count], into.adapter_starts[:count], into.adapter_counts[:count] = found[1:]
    return count


def _pack_tables(pieces: list[Work], block_tokens: int, into: Sections) -> int:
    """Blocks that hold the tokens seen after this step, one piece after the other."""
    tables = [piece.sequence.blocks for piece in pieces]
    lengths = [-(-(piece.sequence.computed + piece.tokens) // block_tokens) for piece in pieces]
    total = sum(lengths)
    flat = chain.from_iterable(table[:length] for table, length in zip(tables, lengths, strict=True))
    into.tables[:total] = np.fromiter(flat, dtype=np.int32, count=total)
    into.table_starts[0] = 0
    np.cumsum(lengths[:-1], out=into.table_starts[1 : len(pieces)])
    return total
