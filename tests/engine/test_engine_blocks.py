"""The block pool: free + held = all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.engine.blocks import BlockPool, OutOfBlocks


@given(st.data())
def test_free_and_held_blocks_are_all_blocks_and_no_block_has_two_holders(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4)))
    tokens: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        owner = data.draw(st.integers(0, 4))
        if data.draw(st.booleans()):
            asked = data.draw(st.integers(0, 30))
            before = (pool.free, list(pool.blocks_of(owner)))
            try:
                held = pool.extend(owner, asked)
            except OutOfBlocks:
                assert (pool.free, list(pool.blocks_of(owner))) == before
            else:
                tokens[owner] = max(tokens.get(owner, 0), asked)
                assert held[: len(before[1])] == before[1]
                assert len(held) == pool.blocks_for(tokens[owner])
        else:
            assert pool.release(owner) == pool.blocks_for(tokens.pop(owner, 0))
        held_blocks = [block for key in range(5) for block in pool.blocks_of(key)]
        assert len(held_blocks) == len(set(held_blocks)) == pool.held
        assert pool.free + pool.held == pool.total


def test_a_pool_refuses_what_it_cannot_give_and_changes_nothing() -> None:
    pool = BlockPool(2, 16)
    pool.extend(1, 17)
    with pytest.raises(OutOfBlocks):
        pool.extend(2, 1)
    assert (pool.free, pool.holders) == (0, 1)
