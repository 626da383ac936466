"""The pools of the benchmark of KV allocation keep the rules of the engine's own."""

from collections.abc import Callable

import pytest

from benchmarks import kv_allocation
from benchmarks.kv_allocation import WORKLOADS, BucketPool, CompactingPool, OpenBucketPool, Play
from inferry.engine.blocks import BlockPool

POOLS: dict[str, Callable[[int], BlockPool]] = {
    "today": lambda blocks: BlockPool(blocks, 32),
    "buckets": lambda blocks: BucketPool(blocks, 32, 8),
    "open buckets": lambda blocks: OpenBucketPool(blocks, 32, 64),
    "compaction": lambda blocks: CompactingPool(blocks, 32),
}


@pytest.mark.plain
@pytest.mark.parametrize("arm", POOLS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_blocks_are_held_cached_or_empty(arm: str, workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_allocation, "STEPS", 60)
    pool = POOLS[arm](WORKLOADS[workload].blocks)
    play = Play(WORKLOADS[workload], pool, 1)
    figures = play.run()
    assert 0 <= figures["range_share"] <= 1
    held = [block for call in play.running for block in pool.blocks_of(call.key)]
    assert len(set(held)) == pool.held
    assert pool.free + pool.held == pool.total
    for call in play.running:
        assert pool.find(call.known) == pool.blocks_of(call.key)[: len(call.known)]


def test_compaction_moves_cached_blocks_together_and_they_are_found_as_before() -> None:
    pool = CompactingPool(8, 32)
    for owner in range(4):
        pool.extend(owner, 64)
        pool.name(owner, 0, [b"%d-0" % owner, b"%d-1" % owner])
    for owner in (1, 3, 0, 2):
        pool.release(owner)
    pool.extend(9, 64)  # evicts the blocks of the first that was released
    pool.release(9)
    pool.compact()
    assert pool.moved > 0
    assert [pool.find([b"%d-0" % owner, b"%d-1" % owner]) for owner in (2, 0, 3, 1)] == [[0, 1], [2, 3], [4, 5], []]
    assert pool.free == 8
