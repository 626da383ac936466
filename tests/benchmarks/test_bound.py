"""Lower bounds: they count only what every schedule must do, and no simulated schedule beats them."""

from itertools import combinations, pairwise

from benchmarks.bound import Window, Work, bounds, max_disjoint_windows, min_steps, windows
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.baselines import Direct
from inferry.sim.calls import Run, Step
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import load_model
from inferry.sim.harbor import harbor
from inferry.sim.report import report
from inferry.sim.simulation import Simulation

MODEL = load_model()
COSTS = MODEL.costs
SMALL = harbor(3, seconds=12.0, digests=40)


def a_run(*outputs: int, lane: Lane = Lane.P0, at: float = 10.0, tool_s: float = 1.0, name: str = "r") -> Run:
    steps = tuple(Step("s", ((number + 1, 0, 100),), output, tool_s) for number, output in enumerate(outputs))
    return Run(run_id=name, tenant="t", lane=lane, at=at, steps=steps)


def test_a_call_has_as_many_steps_as_tokens_between_its_arrival_and_its_last_due_token() -> None:
    (only,) = windows([a_run(11)], COSTS)
    assert only == Window(10.0, 10.0 + 0.5 + 0.03 * 10 - COSTS.reply_s, 11, "r")


def test_a_later_call_starts_as_early_as_tools_allow_and_ends_as_late_as_its_slo_allows() -> None:
    found = {(window.steps, window.begins): window.ends for window in windows([a_run(11, 21)], COSTS)}
    earliest = 10.0 + 11 * COSTS.base_s + COSTS.reply_s + 1.0
    latest = 10.0 + (0.5 + 0.3) + 1.0 + (0.5 + 0.6) - COSTS.reply_s
    assert found == {(11, 10.0): 10.8 - COSTS.reply_s, (32, 10.0): latest, (21, earliest): latest}


def test_abandoned_runs_and_digests_force_no_steps() -> None:
    assert windows([replace(a_run(11), cancel_after_s=1.0), a_run(11, lane=Lane.P2)], COSTS) == []


def test_the_largest_disjoint_set_is_found() -> None:
    among = [
        Window(0, 4, 5, "a"),
        Window(3, 6, 6, "b"),
        Window(4, 9, 4, "c"),
        Window(6, 8, 3, "d"),
        Window(1, 9, 9, "e"),
    ]
    apart = [
        disjoint
        for size in range(1, len(among) + 1)
        for disjoint in combinations(sorted(among), size)
        if all(one.ends <= next_one.begins for one, next_one in pairwise(disjoint))
    ]
    most = max(sum(window.steps for window in disjoint) for disjoint in apart)
    disjoint = max_disjoint_windows(among)
    assert sum(window.steps for window in disjoint) == most
    assert tuple(sorted(disjoint)) in apart


def test_no_choice_of_late_runs_leaves_fewer_steps_than_are_forced() -> None:
    names = "abcdefgh"
    among = [Window(i % 3 * 2.0, i % 3 * 2.0 + 2 + i % 2, 5 + 3 * i, names[i]) for i in range(8)]
    for misses in range(4):
        least = min(
            sum(window.steps for window in max_disjoint_windows(window for window in among if window.run not in late))
            for late in combinations(names, misses)
        )
        assert min_steps(among, misses) <= least
    assert min_steps(among, 0) == sum(window.steps for window in max_disjoint_windows(among))


def test_work_is_what_an_unbounded_engine_computes() -> None:
    runs = [run for run in SMALL if run.cancel_after_s is None]
    simulation = Simulation(Direct(), COSTS, replace(MODEL.flags, policy="fcfs"))
    simulation.play(runs)
    (engine,) = simulation.engines
    steps_s = engine.busy_s - engine.steps * COSTS.base_s
    assert 0.93 * steps_s < Work(runs, MODEL).total_s() <= steps_s


def test_a_live_token_counts_when_it_is_due_and_not_before() -> None:
    work = Work([a_run(11)], MODEL)
    none = work.min_work_s(10.49, {})
    first, second, last = (work.min_work_s(at, {}) for at in (10.501, 10.531, 99.0))
    assert none == 0.0 < first < second < last == work.total_s()
    assert work.min_work_s(99.0, {Lane.P0: 1}) == 0.0


def test_a_prefix_shared_by_many_runs_is_computed_whichever_run_is_dropped() -> None:
    shared = ((1, 0, 1600),)
    runs = [replace(a_run(1, name=f"{n}"), steps=(Step("s", (*shared, (n + 2, 0, 16)), 1),)) for n in range(5)]
    dropped = Work(runs, MODEL).min_work_s(99.0, {Lane.P0: 1})
    assert dropped > 1600 * COSTS.prefill_token_s


def test_no_simulated_schedule_that_meets_its_slo_beats_the_bounds() -> None:
    simulation = Simulation(ControlledFrontend(DEFAULT_LANES), COSTS, replace(MODEL.flags, policy="fcfs"))
    simulation.play(SMALL)
    result = report(simulation, "")
    attained = min(result.lanes[lane].attainment for lane in ("P0", "P1"))
    bound = bounds(SMALL, MODEL, attained)
    assert attained > 0.9
    assert 0.5 * result.wall_s < bound.wall_s <= result.wall_s
    done = max(row.at + row.end_s for row in simulation.rows if row.lane is Lane.P2)
    assert 0.4 * done < bound.p2_done_s <= done


def test_fewer_misses_never_allow_more() -> None:
    strict, lenient = bounds(SMALL, MODEL, 1.0), bounds(SMALL, MODEL, 0.95)
    assert strict.wall_s >= lenient.wall_s
    assert strict.p2_done_s > lenient.p2_done_s
