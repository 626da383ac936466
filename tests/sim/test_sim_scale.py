"""Simulations of any length: runs made on demand and rows dropped give the same figures."""

import gc
import itertools
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import scale
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.workers import Capacity
from inferry.sim.block_pool import BlockPool
from inferry.sim.calls import Run
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.prompts import GrowingPrompt, Piece, block_hashes, length
from inferry.sim.report import Tally, report, unloaded_seconds
from inferry.sim.simulation import Simulation

COSTS = CostModel(base_s=0.005, prefill_token_s=25e-6, sequence_s=20e-6, kv_token_s=30e-9, request_s=0.001)
FLAGS = EngineFlags(kv_tokens=60_000, block_tokens=64)


def some_work(jobs: int = 600) -> Iterator[Run]:
    return scale.fleet(3, jobs, runs_per_s=8.0, batches_per_s=0.05, tenants=5)


def a_simulation(tally: Tally | None = None) -> Simulation:
    frontend = GatewayFrontend(DEFAULT_LANES, Capacity(64, 60_000, 4096))
    if tally is None:
        return Simulation(frontend, COSTS, FLAGS, workers=3)
    return Simulation(frontend, COSTS, FLAGS, workers=3, on_call=tally.call, on_run=tally.run)


def test_runs_that_are_made_while_they_are_played_give_what_a_list_of_them_gives() -> None:
    listed, lazy = a_simulation(), a_simulation()
    listed.play(list(some_work()))
    lazy.play_stream(some_work())
    # The same calls, the same ends. What happens at one instant may come in another order: times are about the same.
    assert sorted((row.run, row.step, row.outcome, row.produced) for row in lazy.rows) == sorted(
        (row.run, row.step, row.outcome, row.produced) for row in listed.rows
    )
    assert len(lazy.runs) == len(listed.runs)
    assert sum(row.end_s for row in lazy.rows) == pytest.approx(sum(row.end_s for row in listed.rows), rel=0.05)


def test_rows_that_are_counted_and_dropped_give_the_report_of_rows_that_are_kept() -> None:
    kept = a_simulation()
    kept.play_stream(some_work())
    tally = Tally(work=unloaded_seconds(COSTS))
    dropped = a_simulation(tally)
    dropped.play_stream(some_work())
    assert dropped.rows == []
    assert dropped.runs == []
    assert tally.report("a", dropped.engines) == report(kept, "a")


def test_runs_out_of_order_are_refused() -> None:
    runs = sorted(itertools.islice(some_work(), 20), key=lambda run: -run.at)
    with pytest.raises(ValueError, match="begins before"):
        a_simulation().play_stream(iter(runs))


def test_what_stays_in_memory_is_a_few_figures_for_every_job() -> None:
    def stays(jobs: int) -> int:
        tally = Tally()
        simulation = a_simulation(tally)
        tracemalloc.start()
        simulation.play_stream(some_work(jobs))
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert simulation.rows == []
        return left

    few, many = stays(400), stays(2_400)
    # Four or five figures of eight bytes, and room for the arrays to grow; a row alone would take 200.
    assert (many - few) / 2_000 < 240


def test_the_fleet_is_made_on_demand_in_order_and_to_the_job() -> None:
    runs = scale.fleet(1, 5_000)
    assert sum(len(run.steps) for run in runs) == 5_000
    some = list(scale.fleet(1, 5_000))
    assert [run.at for run in some] == sorted(run.at for run in some)
    assert {run.lane for run in some} == set(Lane)
    prompts = [length(step.prompt) for run in some for step in run.steps]
    assert min(prompts) < 500
    assert max(prompts) > 3_000
    assert next(iter(scale.fleet(1, 10**12))).run_id == "run-0"


def test_a_small_size_is_played_to_its_end() -> None:
    played = scale.play(400, workers=2)
    assert (played["jobs"], played["failed"], played["workers"]) == (400, 0, 2)
    assert played["events"] > 400
    assert sum(lane["calls"] for lane in played["lanes"].values()) == 400


PIECES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(1, 70)), max_size=6).map(tuple)


@given(st.lists(PIECES, min_size=1, max_size=5), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_prompts_hashed_one_after_the_other_have_the_hashes_they_have_alone(
    prompts: list[tuple[Piece, ...]], block_tokens: int, salt: int
) -> None:
    growing = GrowingPrompt(block_tokens, salt)
    for prompt in prompts:
        assert growing.block_hashes(prompt) == _by_the_token(prompt, block_tokens, salt)
        assert block_hashes(prompt, block_tokens, salt) == growing.block_hashes(prompt)


def _by_the_token(pieces: tuple[Piece, ...], block_tokens: int, salt: int) -> tuple[int, ...]:
    """Block after block, each as the pieces of it: what a block's hash is said to be made of."""
    hashes = []
    chain = hash((salt, block_tokens))
    rest: tuple[int, ...] = ()
    missing = block_tokens
    for segment, first, count in pieces:
        start, left = first, count
        while left:
            part = min(left, missing)
            rest = (*rest, segment, start, part)
            start, left, missing = start + part, left - part, missing - part
            if not missing:
                chain = hash((chain, *rest))
                hashes.append(chain)
                rest, missing = (), block_tokens
    return tuple(hashes)


class PlainPool:
    """The cache by its law: idle blocks in one order, the oldest goes first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def use(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.held:
                self.held[block] += 1
                continue
            if block not in self.idle and len(self.held) + len(self.idle) == self.total:
                self.idle.popitem(last=False)
            self.idle.pop(block, None)
            self.held[block] = 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                self.idle[block] = None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_oldest_idle_block_is_the_next_to_go_however_often_it_was_used(uses: list[tuple[int, int]]) -> None:
    pool, plain = BlockPool(24), PlainPool(24)
    for first, count in uses:
        blocks = list(range(first, first + count))
        for block in blocks:
            if pool.hits([block]):
                pool.share([block], 1)
            else:
                pool.take(1)
                pool.publish([block], 0, 1)
        plain.use(blocks)
        pool.release(blocks, 0)
        plain.release(blocks)
        assert {block for block in range(60) if pool.hits([block])} == set(plain.idle)
