"""Sizes that passes are captured for, and the arrangement of a step in one array. No kernel runs."""

import numpy as np
import pytest

from engine.gpu.gpu_steps import a_capacity, a_piece, spread
from inferry.engine.gpu.buckets import bucket_for, decode_buckets, row_buckets
from inferry.engine.gpu.metadata import DECODES, LAST_ROWS, ROWS, TILES, Capacity, host_sections, pack, section_lengths


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 100, 127, 128, 256, 1000])
@pytest.mark.parametrize("buckets", [decode_buckets, row_buckets])
def test_every_size_has_a_bucket_and_the_last_is_the_limit(limit: int, buckets) -> None:  # type: ignore[no-untyped-def]
    sizes = buckets(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == limit
    for wanted in range(1, limit + 1):
        bucket = bucket_for(sizes, wanted)
        assert bucket is not None
        assert wanted <= bucket <= limit


def test_a_size_beyond_the_largest_has_no_bucket() -> None:
    assert bucket_for([1, 2, 4], 5) is None


def test_padding_of_many_rows_is_less_than_a_fifth() -> None:
    sizes = row_buckets(2048)
    for wanted in range(257, 2049):
        bucket = bucket_for(sizes, wanted)
        assert bucket is not None
        assert bucket - wanted < bucket / 5


def test_tiles_of_any_chunks_fit_the_capacity() -> None:
    capacity = a_capacity()
    for lengths in ([2] * 6, [33, 2, 2], [9, 9, 9], [64]):
        tiles = sum(-(-length // capacity.tile_queries) for length in lengths)
        assert tiles <= capacity.tiles(sum(lengths))


def test_a_step_is_packed_with_single_tokens_first() -> None:
    """One chunk that ends, one that does not, and two single tokens, one of them sampled by the step before."""
    ending, begun = a_piece(1, 0, 5), a_piece(2, 0, 4, more=3)
    single, unknown = a_piece(3, 20, 1), a_piece(4, 7, 1)
    unknown.sequence.tokens[7] = -1
    capacity = a_capacity()
    array = np.full(sum(section_lengths(capacity).values()), -99, dtype=np.int32)
    sections = host_sections(capacity, array)
    packed = pack(spread([ending, begun, single, unknown]), capacity, sections, {4: 2})
    assert [piece.sequence.key for piece in packed.pieces] == [3, 4, 1, 2]
    assert [piece.sequence.key for piece in packed.ending] == [3, 4, 1]
    assert (packed.rows, packed.decodes) == (11, 2)
    counts = sections.counts
    assert (counts[ROWS], counts[DECODES], counts[TILES], counts[LAST_ROWS]) == (11, 2, packed.tiles, 3)
    assert sections.starts[:5].tolist() == [0, 1, 2, 7, 11]
    assert sections.computed[:4].tolist() == [20, 7, 0, 0]
    assert sections.last_rows[:3].tolist() == [0, 1, 6]
    assert sections.codes[1] == -1 - 2
    assert sections.codes[0] == single.sequence.tokens[20]
    assert sections.codes[2:7].tolist() == ending.sequence.tokens
    assert sections.row_pieces[:11].tolist() == [0, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3]
    assert array[packed.used - 1] != -99


def test_sections_do_not_overlap() -> None:
    capacity = Capacity(rows=50, pieces=7, blocks=30, tile_queries=4, block_tokens=8, adapters=3)
    array = np.zeros(sum(section_lengths(capacity).values()), dtype=np.int32)
    sections = host_sections(capacity, array)
    for value, name in enumerate(section_lengths(capacity), 1):
        getattr(sections, name)[:] = value
    assert [int(getattr(sections, name)[-1]) for name in section_lengths(capacity)] == [*range(1, 15)]
