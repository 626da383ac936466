"""Lower bounds: that they count what must be, and that nothing played in the simulator ever beats them."""

from itertools import combinations, pairwise

from inferry.bench.bound import Window, Work, best_family, bounds, forced_steps, windows
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.calls import Run, Step
from inferry.sim.controlled import ControlledDoor
from inferry.sim.costs import load_model
from inferry.sim.doors import Direct
from inferry.sim.harbor import harbor
from inferry.sim.report import report
from inferry.sim.world import World

MODEL = load_model()
COSTS = MODEL.costs
SMALL = harbor(3, seconds=12.0, digests=40)


def a_run(*outputs: int, lane: Lane = Lane.P0, at: float = 10.0, tool_s: float = 1.0, name: str = "r") -> Run:
    steps = tuple(Step("s", ((number + 1, 0, 100),), output, tool_s) for number, output in enumerate(outputs))
    return Run(run_id=name, tenant="t", lane=lane, at=at, steps=steps)


def test_a_call_has_as_many_steps_as_tokens_between_its_arrival_and_its_last_due_token() -> None:
    (only,) = windows([a_run(11)], COSTS)
    assert only == Window(10.0, 10.0 + 0.5 + 0.03 * 10 - COSTS.reply_s, 11, "r")


def test_a_later_call_may_come_as_soon_as_steps_and_tools_allow_and_end_as_late_as_promises_do() -> None:
    found = {(window.steps, window.begins): window.ends for window in windows([a_run(11, 21)], COSTS)}
    earliest = 10.0 + 11 * COSTS.base_s + COSTS.reply_s + 1.0
    latest = 10.0 + (0.5 + 0.3) + 1.0 + (0.5 + 0.6) - COSTS.reply_s
    assert found == {(11, 10.0): 10.8 - COSTS.reply_s, (32, 10.0): latest, (21, earliest): latest}


def test_abandoned_runs_and_digests_force_no_steps() -> None:
    assert windows([replace(a_run(11), cancel_after_s=1.0), a_run(11, lane=Lane.P2)], COSTS) == []


def test_the_best_family_is_the_best_of_all_that_do_not_overlap() -> None:
    among = [
        Window(0, 4, 5, "a"),
        Window(3, 6, 6, "b"),
        Window(4, 9, 4, "c"),
        Window(6, 8, 3, "d"),
        Window(1, 9, 9, "e"),
    ]
    apart = [
        family
        for size in range(1, len(among) + 1)
        for family in combinations(sorted(among), size)
        if all(one.ends <= next_one.begins for one, next_one in pairwise(family))
    ]
    most = max(sum(window.steps for window in family) for family in apart)
    family = best_family(among)
    assert sum(window.steps for window in family) == most
    assert tuple(sorted(family)) in apart


def test_no_choice_of_late_runs_leaves_fewer_steps_than_are_forced() -> None:
    names = "abcdefgh"
    among = [Window(i % 3 * 2.0, i % 3 * 2.0 + 2 + i % 2, 5 + 3 * i, names[i]) for i in range(8)]
    for misses in range(4):
        least = min(
            sum(window.steps for window in best_family(window for window in among if window.run not in late))
            for late in combinations(names, misses)
        )
        assert forced_steps(among, misses) <= least
    assert forced_steps(among, 0) == sum(window.steps for window in best_family(among))


def test_work_is_what_an_engine_with_room_for_everything_computes() -> None:
    runs = [run for run in SMALL if run.cancel_after_s is None]
    world = World(Direct(), COSTS, replace(MODEL.flags, policy="fcfs"))
    world.play(runs)
    (engine,) = world.engines
    steps_s = engine.busy_s - engine.steps * COSTS.base_s
    assert 0.93 * steps_s < Work(runs, MODEL).total_s() <= steps_s


def test_a_live_token_counts_when_it_is_due_and_not_before() -> None:
    work = Work([a_run(11)], MODEL)
    none = work.forced_s(10.49, {})
    first, second, last = (work.forced_s(at, {}) for at in (10.501, 10.531, 99.0))
    assert none == 0.0 < first < second < last == work.total_s()
    assert work.forced_s(99.0, {Lane.P0: 1}) == 0.0


def test_what_many_runs_share_is_computed_whoever_is_struck() -> None:
    shared = ((1, 0, 1600),)
    runs = [replace(a_run(1, name=f"{n}"), steps=(Step("s", (*shared, (n + 2, 0, 16)), 1),)) for n in range(5)]
    struck = Work(runs, MODEL).forced_s(99.0, {Lane.P0: 1})
    assert struck > 1600 * COSTS.prefill_token_s


def test_nothing_that_keeps_its_promises_in_the_simulator_beats_the_bounds() -> None:
    world = World(ControlledDoor(DEFAULT_LANES), COSTS, replace(MODEL.flags, policy="fcfs"))
    world.play(SMALL)
    result = report(world, "")
    kept = min(result.lanes[lane].attainment for lane in ("P0", "P1"))
    bound = bounds(SMALL, MODEL, kept)
    assert kept > 0.9
    assert 0.5 * result.wall_s < bound.wall_s <= result.wall_s
    done = max(row.at + row.end_s for row in world.rows if row.lane is Lane.P2)
    assert 0.4 * done < bound.p2_done_s <= done


def test_fewer_misses_never_allow_more() -> None:
    strict, lenient = bounds(SMALL, MODEL, 1.0), bounds(SMALL, MODEL, 0.95)
    assert strict.wall_s >= lenient.wall_s
    assert strict.p2_done_s > lenient.p2_done_s
