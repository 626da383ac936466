"""The simulation: runs are played to their end, repeatably, with every baseline."""

from collections.abc import Callable

import msgspec
import pytest

from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ledger import LedgerEntry
from inferry.domain.workers import Capacity
from inferry.sim.arrivals import agents, bursts, poisson, uniform_lengths
from inferry.sim.baselines import Capped, Direct, Paced
from inferry.sim.calls import Run, Step
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.harbor import harbor
from inferry.sim.report import report
from inferry.sim.simulation import Frontend, Simulation

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


def a_gateway() -> GatewayFrontend:
    return GatewayFrontend(DEFAULT_LANES, Capacity(256, 834_480, 3072))


FRONTENDS: dict[str, Callable[[], Frontend]] = {
    "direct": Direct,
    "capped": lambda: Capped(4),
    "paced": lambda: Paced(3072, 128, 8),
    "gateway": a_gateway,
}


def some_work(seed: int = 1) -> list[Run]:
    return harbor(seed, seconds=12, digests=20)


def played(frontend: Frontend, runs: list[Run], workers: int = 1) -> Simulation:
    simulation = Simulation(frontend, COSTS, FLAGS, workers=workers)
    simulation.play(runs)
    return simulation


@pytest.mark.parametrize("name", FRONTENDS)
def test_every_planned_call_happens_unless_its_run_is_abandoned(name: str) -> None:
    runs = some_work()
    simulation = played(FRONTENDS[name](), runs)
    assert len(simulation.runs) == len(runs)
    stayed = {run.run_id for run in runs if run.cancel_after_s is None}
    done = [row for row in simulation.rows if row.outcome == "done"]
    assert sum(row.run in stayed for row in done) == sum(len(run.steps) for run in runs if run.run_id in stayed)
    assert all(row.produced == row.output for row in done)
    assert {row.outcome for row in simulation.rows} <= {"done", "cancelled"}
    for engine in simulation.engines:
        assert (engine.running, engine.waiting, engine.pool.held) == (0, 0, 0)


@pytest.mark.parametrize("name", FRONTENDS)
def test_the_same_work_gives_the_same_rows_byte_for_byte(name: str) -> None:
    first, again = (played(FRONTENDS[name](), some_work()) for _ in range(2))
    assert msgspec.json.encode((first.rows, first.runs)) == msgspec.json.encode((again.rows, again.runs))


def test_a_step_begins_when_the_tool_of_the_step_before_is_done() -> None:
    steps = (Step("one", ((1, 0, 100),), 5, 0.5), Step("two", ((1, 0, 100), (2, 0, 10)), 5, 0.25))
    simulation = played(Direct(), [Run(run_id="r", tenant="t", lane=Lane.P1, at=1.0, steps=steps)])
    one, two = simulation.rows
    assert two.at == pytest.approx(one.at + one.end_s + 0.5)
    assert two.cached == 96
    assert simulation.runs[0].latency_s == pytest.approx(two.at + two.end_s + 0.25 - 1.0)


def test_an_abandoned_run_frees_the_engine_and_is_not_billed_for_the_rest() -> None:
    step = Step("long", ((1, 0, 100),), 1000)
    entries: list[LedgerEntry] = []
    frontend = GatewayFrontend(DEFAULT_LANES, Capacity(256), record=entries.append)
    simulation = played(
        frontend, [Run(run_id="r", tenant="t", lane=Lane.P0, at=0.0, steps=(step,), cancel_after_s=1.0)]
    )
    assert [row.outcome for row in simulation.rows] == ["cancelled"]
    assert simulation.runs[0].cancelled
    assert [(entry.outcome.value, entry.output_tokens < 250) for entry in entries] == [("cancelled", True)]
    assert simulation.engines[0].busy_s < 1.1
    assert (frontend.scheduler.queued, frontend.scheduler.in_flight) == (0, 0)


def test_the_ledger_adds_up_to_what_was_delivered() -> None:
    entries: list[LedgerEntry] = []
    frontend = GatewayFrontend(DEFAULT_LANES, Capacity(256, 834_480, 3072), record=entries.append)
    simulation = played(frontend, some_work(2))
    done = sum(entry.output_tokens for entry in entries if entry.outcome.value == "done")
    assert done == sum(row.produced for row in simulation.rows if row.outcome == "done")
    assert len({(entry.job_id, entry.attempt) for entry in entries}) == len(entries)


def test_lanes_keep_live_calls_fast_beside_a_batch_backlog() -> None:
    runs = harbor(3, seconds=12, digests=60)
    lanes = {}
    for name, frontend in (("direct", Direct()), ("gateway", a_gateway())):
        simulation = Simulation(frontend, COSTS, msgspec.structs.replace(FLAGS, policy="fcfs"))
        simulation.play(runs)
        lanes[name] = report(simulation, name).lanes["P0"]
    assert (lanes["gateway"].ttft_p95 or 0.0) < (lanes["direct"].ttft_p95 or 0.0) / 2
    assert lanes["gateway"].attainment > lanes["direct"].attainment


def test_work_is_spread_over_the_workers() -> None:
    runs = list(poisson(1, 20, 5, uniform_lengths((50, 400), (10, 60))))
    simulation = played(a_gateway(), runs, workers=4)
    assert {row.worker for row in simulation.rows} == {0, 1, 2, 3}
    assert report(simulation, "four").utilisation < 1


def test_a_controller_may_change_the_capacity() -> None:
    seen: list[float] = []

    def controller(worker: int, engine: Engine, now: float) -> Capacity:
        seen.append(now)
        return Capacity(2 if now < 1 else 64)

    frontend = GatewayFrontend(DEFAULT_LANES, Capacity(2), controller=controller, capacity_interval_s=0.5)
    simulation = played(frontend, list(bursts(1, 30, 4.0, 0.1, 3.0, uniform_lengths((50, 60), (50, 60)))))
    assert len(seen) >= 2
    assert all(row.outcome == "done" for row in simulation.rows)


def test_arrivals_are_repeatable_and_agents_carry_their_context() -> None:
    lengths = uniform_lengths((10, 20), (5, 6))
    assert list(agents(1, 3, 4, lengths)) == list(agents(1, 3, 4, lengths))
    run = next(iter(agents(1, 1, 3, lengths)))
    assert run.steps[1].prompt[:1] == run.steps[0].prompt
    assert len(list(bursts(1, 10, 5.0, 0.5, 10.0, lengths))) == 20
