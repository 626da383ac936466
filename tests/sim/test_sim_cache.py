"""The block cache: blocks are conserved, held ones stay, idle ones are evicted oldest first."""

import pytest

from inferry.sim.block_pool import BlockPool, OutOfBlocks
from inferry.sim.prompts import block_hashes, length, tail


def all_of(pool: BlockPool) -> int:
    return pool.held + pool.idle + pool.empty


def test_blocks_are_held_idle_or_empty_and_never_more_than_there_are() -> None:
    pool = BlockPool(8)
    pool.take(3)
    named = pool.publish((1, 2, 3), 0, 2)
    assert (named, pool.held, pool.idle, pool.empty) == ([1, 2], 3, 0, 5)
    pool.release(named, 1)
    assert (pool.held, pool.idle, pool.empty, pool.available) == (0, 2, 6, 8)
    pool.take(7)
    assert (pool.held, pool.idle, all_of(pool)) == (7, 1, 8)
    with pytest.raises(OutOfBlocks):
        pool.take(2)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    pool.take(3)
    pool.release(pool.publish((1, 2, 3), 0, 3), 0)
    pool.take(1)
    assert pool.hits((1, 2, 3)) == 2


def test_a_shared_block_is_held_once_and_freed_by_its_last_holder() -> None:
    pool = BlockPool(4)
    pool.take(2)
    first = pool.publish((7, 8), 0, 2)
    pool.share((7, 8, 9), 2)
    assert pool.held == 2
    pool.release(first, 0)
    assert (pool.held, pool.idle) == (2, 0)
    pool.release([7, 8], 0)
    assert (pool.held, pool.idle) == (0, 2)


def test_a_prefix_that_is_there_already_keeps_its_copy() -> None:
    pool = BlockPool(4)
    pool.take(1)
    pool.publish((5,), 0, 1)
    pool.take(1)
    assert pool.publish((5,), 0, 1) == []
    assert (pool.held, pool.anonymous) == (2, 1)


def test_hashes_are_equal_exactly_as_far_as_prompts_begin_alike() -> None:
    system, ticket, other = (1, 0, 24), (2, 0, 40), (3, 0, 40)
    mine = block_hashes((system, ticket), 16)
    assert len(mine) == 4
    assert block_hashes((system, (2, 0, 30)), 16) == mine[:3]
    theirs = block_hashes((system, other), 16)
    assert theirs[0] == mine[0]
    assert not set(theirs[1:]) & set(mine[1:])
    assert not set(block_hashes((system, ticket), 16, salt=1)) & set(mine)


def test_the_tail_of_a_prompt_is_another_prompt() -> None:
    pieces = ((1, 0, 24), (2, 0, 40))
    assert tail(pieces, 100) == pieces
    assert tail(pieces, 30) == ((2, 10, 30),)
    assert length(tail(pieces, 50)) == 50
    assert tail(pieces, 50)[0] == (1, 14, 10)
