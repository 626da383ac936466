"""Arrivals: scaled, shortened, assigned to lanes, and the busiest window."""

import pytest

from inferry.domain.lanes import Lane
from inferry.sim.arrivals import assign_lanes, busiest_window, scale_rate, truncate
from inferry.sim.calls import Run, Step


def a_run(name: str, at: float, steps: int = 1) -> Run:
    step = Step("call", ((1, 0, 10),), 5, 0.5)
    return Run(run_id=name, tenant="t", lane=Lane.P1, at=at, steps=(step,) * steps)


def test_scaled_arrivals_keep_the_timing_inside_runs() -> None:
    (run,) = scale_rate([a_run("a", 10.0, steps=2)], 4.0)
    assert run.at == 2.5
    assert [step.tool_s for step in run.steps] == [0.5, 0.5]


def test_the_first_seconds_are_those_of_beginnings() -> None:
    assert [run.run_id for run in truncate([a_run("a", 0.0), a_run("b", 5.0)], 5.0)] == ["a"]


def test_lanes_are_assigned_by_share_and_seed() -> None:
    runs = [a_run(f"{number}", number) for number in range(1_000)]
    dealt = assign_lanes(runs, {Lane.P0: 1.0, Lane.P2: 3.0}, seed=1)
    assert sum(run.lane is Lane.P0 for run in dealt) == pytest.approx(250, abs=50)
    assert dealt == assign_lanes(runs, {Lane.P0: 1.0, Lane.P2: 3.0}, seed=1)
    assert dealt != assign_lanes(runs, {Lane.P0: 1.0, Lane.P2: 3.0}, seed=2)


def test_the_busiest_stretch_has_the_most_calls_per_second_and_begins_at_zero() -> None:
    quiet = [a_run(f"q{number}", number * 10.0) for number in range(20)]
    burst = [a_run(f"b{number}", 73.0 + number * 0.1, steps=2) for number in range(5)]
    chosen = busiest_window([*quiet, *burst], 10)
    assert [run.run_id for run in chosen] == [f"b{number}" for number in range(5)]
    assert chosen[0].at == 0.0
    assert chosen[-1].at == pytest.approx(0.4)


def test_the_busiest_stretch_of_little_work_is_all_of_it() -> None:
    assert len(busiest_window([a_run("a", 3.0), a_run("b", 9.0)], 100)) == 2
    assert busiest_window([], 5) == []
