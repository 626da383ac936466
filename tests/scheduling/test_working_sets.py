"""How long an idle run is kept, when pauses pay, and what is learned from cache hits."""

from math import inf

import pytest

from inferry.domain.values import replace
from inferry.domain.workers import DirectWaits
from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.worker_state import WorkerState
from inferry.scheduling.working_sets import (
    KEEP_FACTOR,
    LOWER_FACTOR,
    MAX_KEEP_S,
    MAX_MISSES,
    MAX_OVERCOMMIT,
    MAX_TOOL_S,
    MIN_KEEP_S,
    RAISE_FACTOR,
    TOOL_TIME_FACTOR,
    RunTree,
    WorkingSets,
    learn,
)
from scheduling.scheduler_harness import offer
from scheduling.test_sessions import a_call, a_scheduler
from support.builders import a_view

KV = 1_000


def a_home(*, refill_s: float | None = None, kv_tokens: int | None = None) -> WorkingSets:
    """The resident runs of a worker that computes all of its cache in `refill_s`."""
    view = replace(a_view("w", kv_tokens=kv_tokens), kv_capacity=None if kv_tokens else KV)
    if refill_s is not None:
        direct = DirectWaits((0.0,) * 3, 0.0, 2048, computed_token_s=refill_s / KV)
        view = replace(view, capacity=replace(view.capacity, direct=direct))
    worker = WorkerState("w")
    worker.update_view(view, TickContext())
    return WorkingSets(worker)


def with_a_paused_call(home: WorkingSets) -> WorkingSets:
    """A call pauses: what is learned then raises the limit."""
    scheduler = a_scheduler()
    offer(scheduler, a_call("a"), a_call("b"), a_call("c"))
    sessions = scheduler._sessions
    assert sessions is not None
    home.paused = sessions._sets["w"].paused
    assert home.paused
    return home


@pytest.mark.parametrize(
    ("tool_s", "refill_s", "keep_s"),
    [
        (None, None, MAX_KEEP_S),
        (3.0, None, 3.0 * KEEP_FACTOR),
        (0.1, None, MIN_KEEP_S),
        (50.0, None, MAX_KEEP_S),
        (6.0, 4.0, 4.0),
        (6.0, 0.2, MIN_KEEP_S),
    ],
)
def test_an_idle_run_is_kept_for_twice_the_tool_time_within_bounds(
    tool_s: float | None, refill_s: float | None, keep_s: float
) -> None:
    home = a_home(refill_s=refill_s)
    home.tool_s = tool_s
    assert home.keep_s() == keep_s


def test_a_pause_pays_while_tools_take_less_than_a_refill_with_a_margin() -> None:
    home = a_home(refill_s=6.0)
    assert home.pays(), "no tool time is known"
    home.tool_s = 6.0 / TOOL_TIME_FACTOR
    assert home.pays()
    home.tool_s += 0.01
    assert not home.pays()
    slow = a_home()
    slow.tool_s = MAX_TOOL_S
    assert slow.refill_s() == inf
    assert slow.pays(), "the speed of the engine is not known"


def test_the_refill_time_stays_known_when_a_view_does_not_tell_it() -> None:
    home = a_home(refill_s=6.0)
    assert home.refill_s() == pytest.approx(6.0)
    home.worker.update_view(replace(a_view("w"), kv_capacity=KV), TickContext())
    assert home.refill_s() == pytest.approx(6.0)


def test_a_tool_time_counts_for_no_more_than_a_refill_or_a_minute() -> None:
    home = a_home(refill_s=6.0)
    home.used_tools(1_000.0)
    assert home.tool_s == pytest.approx(6.0)
    slow = a_home()
    slow.used_tools(1_000.0)
    assert slow.tool_s == MAX_TOOL_S
    slow.used_tools(0.0)
    assert slow.tool_s == pytest.approx(0.98 * MAX_TOOL_S)


def test_hits_of_runs_that_had_left_raise_the_limit_up_to_a_bound_and_only_while_calls_pause() -> None:
    home = a_home()
    learn(home, was_kept=False, known_tokens=100, cached_tokens=100)
    assert home.overcommit == 1.0
    with_a_paused_call(home)
    learn(home, was_kept=False, known_tokens=100, cached_tokens=50)
    assert home.overcommit == RAISE_FACTOR, "half of what is known is a hit"
    learn(home, was_kept=True, known_tokens=100, cached_tokens=100)
    assert home.overcommit == RAISE_FACTOR, "a resident run is expected to hit"
    for _ in range(1_000):
        learn(home, was_kept=False, known_tokens=100, cached_tokens=100)
    assert home.overcommit == MAX_OVERCOMMIT
    assert home.fits(int(MAX_OVERCOMMIT * KV))
    assert not home.fits(int(MAX_OVERCOMMIT * KV) + 1)


def test_a_miss_of_a_resident_run_lowers_the_limit_down_to_the_cache() -> None:
    home = a_home()
    home.overcommit = 1.5
    learn(home, was_kept=False, known_tokens=100, cached_tokens=49)
    assert home.overcommit == 1.5, "the run had left"
    learn(home, was_kept=True, known_tokens=0, cached_tokens=0)
    assert home.overcommit == 1.5, "nothing could be cached"
    learn(home, was_kept=True, known_tokens=100, cached_tokens=49)
    assert home.overcommit == 1.5 * LOWER_FACTOR
    for _ in range(100):
        learn(home, was_kept=True, known_tokens=100, cached_tokens=0)
    assert home.overcommit == 1.0


def test_one_hit_shows_that_the_worker_has_a_cache() -> None:
    home = a_home()
    for _ in range(MAX_MISSES):
        assert home.caches()
        learn(home, was_kept=True, known_tokens=100, cached_tokens=0)
    assert not home.caches()
    learn(home, was_kept=False, known_tokens=0, cached_tokens=1)
    assert home.caches()


def test_hits_in_the_counters_of_the_engine_show_it_too() -> None:
    home = a_home()
    home.misses = MAX_MISSES
    view = home.worker.view
    assert view is not None
    home.worker.update_view(replace(view, prefix_hits=0), TickContext())
    assert not home.caches()
    home.worker.update_view(replace(view, prefix_hits=1), TickContext())
    assert home.caches()


def test_the_kv_limit_stands_for_a_cache_whose_size_is_not_told() -> None:
    assert a_home(kv_tokens=500).fits(500)
    assert not a_home(kv_tokens=500).fits(501)
    unknown = WorkingSets(WorkerState("w"))
    assert unknown.fits(10**9)


def test_the_tokens_of_a_tenant_go_with_its_runs() -> None:
    home = a_home()
    tree = RunTree("a")
    home.count(tree, 100)
    home.count(tree, 50)
    assert home.tenant_tokens == {"a": 150}
    home.count(tree, -150)
    assert (home.tokens, home.tenant_tokens) == (0, {})
