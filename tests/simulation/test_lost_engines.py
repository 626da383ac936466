"""Four engines behind the gateway, in the simulator: work spreads over them, and the loss of one loses no job."""

from collections.abc import Iterator, Sequence

import pytest

from inferry.cli.simulate_setup import direct_arms
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.calls import CallRow, Run, Step
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import load_model
from inferry.sim.harbor import harbor
from inferry.sim.report import HARBOR_TTFT_S, attains
from inferry.sim.simulation import Frontend, Simulation

ENGINES = 4
MODEL = load_model()
HOT_PREFIX = ((1 << 40, 0, 6_000),)
"""A system prompt that every call begins with, and that one engine has first."""


def burst(seed: int, digests: int = 150) -> list[Run]:
    """Agents of three lanes and a backlog of batch jobs; runs that no agent gives up."""
    runs = harbor(seed, seconds=20, scale=2.0, digests=digests)
    return [replace(run, cancel_after_s=None) for run in runs]


def with_hot_prefix(runs: Sequence[Run]) -> Iterator[Run]:
    for run in runs:
        steps = [replace(step, prompt=(*HOT_PREFIX, *step.prompt)) for step in run.steps]
        yield replace(run, tenant="one", steps=tuple(steps))


def play(frontend: Frontend, runs: Sequence[Run], *kills: tuple[int, float]) -> Simulation:
    simulation = Simulation(frontend, MODEL.costs, replace(MODEL.flags, policy="priority"), workers=ENGINES)
    for engine, at in kills:
        simulation.kill(engine, at)
    simulation.play(runs)
    return simulation


def attainment(rows: Sequence[CallRow], lane: Lane) -> float:
    mine = [row for row in rows if row.lane is lane]
    return sum(attains(row, HARBOR_TTFT_S[lane]) for row in mine) / len(mine)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_prefix_that_all_calls_share_does_not_draw_them_to_one_engine(seed: int) -> None:
    simulation = play(ControlledFrontend(DEFAULT_LANES), list(with_hot_prefix(burst(seed))))
    work = [engine.computed_tokens for engine in simulation.engines]
    assert max(work) <= 1.25 * sum(work) / ENGINES


def test_no_job_is_lost_with_an_engine_in_the_middle_of_a_burst() -> None:
    runs = burst(1)
    planned = sorted((run.run_id, step.name) for run in runs for step in run.steps)
    direct = play(direct_arms(MODEL, ENGINES)[1].frontend(), runs, (1, 8.0))
    assert {row.outcome for row in direct.rows} == {"done", "failed"}
    simulation = play(ControlledFrontend(DEFAULT_LANES), runs, (1, 8.0))
    assert sorted((row.run, row.step) for row in simulation.rows) == planned
    assert all(row.outcome == "done" and row.produced == row.output for row in simulation.rows)
    assert simulation.busy_s[1] < 8.1 < min(simulation.busy_s[worker] for worker in (0, 2, 3))
    assert attainment(simulation.rows, Lane.P0) > 0.85
    assert attainment(simulation.rows, Lane.P1) > 0.95


def test_a_stream_resumes_with_its_output_and_its_schedule() -> None:
    """It waits for a new prefill only: the tokens that it has are neither computed nor due again."""
    step = Step("only", ((1, 0, 1_000),), 600)
    run = Run(run_id="a", tenant="t", lane=Lane.P0, at=0.0, steps=(step,))
    (alone,) = play(ControlledFrontend(DEFAULT_LANES), [run]).rows
    assert alone.worker is not None
    resumed = play(ControlledFrontend(DEFAULT_LANES), [run], (alone.worker, alone.end_s / 2))
    (row,) = resumed.rows
    assert row.worker != alone.worker
    assert row.ttft_s == alone.ttft_s
    assert row.end_s - alone.end_s < 0.2
    assert attains(row, HARBOR_TTFT_S[Lane.P0])
    assert sum(engine.output_tokens for engine in resumed.engines) <= step.output + 3


def test_a_job_whose_engines_are_lost_three_times_fails() -> None:
    run = Run(run_id="a", tenant="t", lane=Lane.P1, at=0.0, steps=(Step("only", ((1, 0, 1_000),), 3_000),))
    kills: list[tuple[int, float]] = []
    for number in range(ENGINES - 1):
        (row,) = play(ControlledFrontend(DEFAULT_LANES), [run], *kills).rows
        assert (row.outcome, row.worker is None) == ("done", False)
        kills.append((row.worker or 0, 2.0 + number))
    (row,) = play(ControlledFrontend(DEFAULT_LANES), [run], *kills).rows
    assert row.outcome == "failed"
