"""The world: runs are played to their end, the same way every time, through every door."""

from collections.abc import Callable

import msgspec
import pytest

from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ledger import LedgerEntry
from inferry.domain.workers import Room
from inferry.sim.arrivals import agents, bursts, even_lengths, poisson
from inferry.sim.calls import Run, Step
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.doors import Capped, Direct, Paced
from inferry.sim.engine import Engine
from inferry.sim.gateway import GatewayDoor
from inferry.sim.harbor import harbor
from inferry.sim.report import report
from inferry.sim.world import Door, World

COSTS = CostModel(
    base_s=0.005,
    prefill_token_s=25e-6,
    sequence_s=20e-6,
    kv_token_s=30e-9,
    attention_pair_s=5e-9,
    request_s=0.001,
    token_s=100e-6,
    reply_s=0.001,
)
FLAGS = EngineFlags(max_num_seqs=256, max_num_batched_tokens=2048, policy="priority")


def a_gateway() -> GatewayDoor:
    return GatewayDoor(DEFAULT_LANES, Room(256, 834_480, 3072))


DOORS: dict[str, Callable[[], Door]] = {
    "direct": Direct,
    "capped": lambda: Capped(4),
    "paced": lambda: Paced(3072, 128, 8),
    "gateway": a_gateway,
}


def some_work(seed: int = 1) -> list[Run]:
    return harbor(seed, seconds=12, digests=20)


def played(door: Door, runs: list[Run], workers: int = 1) -> World:
    world = World(door, COSTS, FLAGS, workers=workers)
    world.play(runs)
    return world


@pytest.mark.parametrize("name", DOORS)
def test_every_planned_call_happens_unless_its_agent_walks_away(name: str) -> None:
    runs = some_work()
    world = played(DOORS[name](), runs)
    assert len(world.runs) == len(runs)
    stayed = {run.run_id for run in runs if run.cancel_after_s is None}
    done = [row for row in world.rows if row.outcome == "done"]
    assert sum(row.run in stayed for row in done) == sum(len(run.steps) for run in runs if run.run_id in stayed)
    assert all(row.produced == row.output for row in done)
    assert {row.outcome for row in world.rows} <= {"done", "cancelled"}
    for engine in world.engines:
        assert (engine.running, engine.waiting, engine.pool.held) == (0, 0, 0)


@pytest.mark.parametrize("name", DOORS)
def test_the_same_work_gives_the_same_rows_byte_for_byte(name: str) -> None:
    first, again = (played(DOORS[name](), some_work()) for _ in range(2))
    assert msgspec.json.encode((first.rows, first.runs)) == msgspec.json.encode((again.rows, again.runs))


def test_a_step_begins_when_the_tool_of_the_step_before_is_done() -> None:
    steps = (Step("one", ((1, 0, 100),), 5, 0.5), Step("two", ((1, 0, 100), (2, 0, 10)), 5, 0.25))
    world = played(Direct(), [Run(run_id="r", tenant="t", lane=Lane.P1, at=1.0, steps=steps)])
    one, two = world.rows
    assert two.at == pytest.approx(one.at + one.end_s + 0.5)
    assert two.cached == 96
    assert world.runs[0].latency_s == pytest.approx(two.at + two.end_s + 0.25 - 1.0)


def test_an_agent_that_walks_away_frees_the_engine_and_is_not_billed_for_the_rest() -> None:
    step = Step("long", ((1, 0, 100),), 1000)
    entries: list[LedgerEntry] = []
    door = GatewayDoor(DEFAULT_LANES, Room(256), record=entries.append)
    world = played(door, [Run(run_id="r", tenant="t", lane=Lane.P0, at=0.0, steps=(step,), cancel_after_s=1.0)])
    assert [row.outcome for row in world.rows] == ["cancelled"]
    assert world.runs[0].cancelled
    assert [(entry.outcome.value, entry.output_tokens < 250) for entry in entries] == [("cancelled", True)]
    assert world.engines[0].busy_s < 1.1
    assert (door.scheduler.queued, door.scheduler.in_flight) == (0, 0)


def test_the_ledger_adds_up_to_what_was_delivered() -> None:
    entries: list[LedgerEntry] = []
    door = GatewayDoor(DEFAULT_LANES, Room(256, 834_480, 3072), record=entries.append)
    world = played(door, some_work(2))
    done = sum(entry.output_tokens for entry in entries if entry.outcome.value == "done")
    assert done == sum(row.produced for row in world.rows if row.outcome == "done")
    assert len({(entry.job_id, entry.attempt) for entry in entries}) == len(entries)


def test_lanes_keep_live_calls_fast_where_a_pile_of_batch_calls_would_bury_them() -> None:
    runs = harbor(3, seconds=12, digests=60)
    lanes = {}
    for name, door in (("direct", Direct()), ("gateway", a_gateway())):
        world = World(door, COSTS, msgspec.structs.replace(FLAGS, policy="fcfs"))
        world.play(runs)
        lanes[name] = report(world, name).lanes["P0"]
    assert (lanes["gateway"].ttft_p95 or 0.0) < (lanes["direct"].ttft_p95 or 0.0) / 2
    assert lanes["gateway"].attainment > lanes["direct"].attainment


def test_work_is_spread_over_the_workers() -> None:
    runs = list(poisson(1, 20, 5, even_lengths((50, 400), (10, 60))))
    world = played(a_gateway(), runs, workers=4)
    assert {row.worker for row in world.rows} == {0, 1, 2, 3}
    assert report(world, "four").utilisation < 1


def test_a_controller_may_change_the_room_as_it_goes() -> None:
    seen: list[float] = []

    def controller(worker: int, engine: Engine, now: float) -> Room:
        seen.append(now)
        return Room(2 if now < 1 else 64)

    door = GatewayDoor(DEFAULT_LANES, Room(2), controller=controller, beat_s=0.5)
    world = played(door, list(bursts(1, 30, 4.0, 0.1, 3.0, even_lengths((50, 60), (50, 60)))))
    assert len(seen) >= 2
    assert all(row.outcome == "done" for row in world.rows)


def test_arrivals_are_repeatable_and_agents_carry_their_context() -> None:
    lengths = even_lengths((10, 20), (5, 6))
    assert list(agents(1, 3, 4, lengths)) == list(agents(1, 3, 4, lengths))
    run = next(iter(agents(1, 1, 3, lengths)))
    assert run.steps[1].prompt[:1] == run.steps[0].prompt
    assert len(list(bursts(1, 10, 5.0, 0.5, 10.0, lengths))) == 20
