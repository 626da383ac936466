"""Runs pause at tool boundaries while their KV does not fit, for a bounded time."""

import pytest

from inferry.domain.decisions import SESSION_PAUSE
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended, JobLocation
from inferry.domain.routes import Task
from inferry.domain.values import replace
from inferry.domain.workers import DirectWaits, WorkerView
from inferry.scheduling.scheduler import Scheduler
from inferry.scheduling.sessions import SessionLimits
from inferry.scheduling.working_sets import MAX_KEEP_S, MAX_MISSES
from scheduling.scheduler_harness import offer, sent
from support.builders import a_job, a_policy, a_view

KV = 1_000
PAUSE_S = 50.0


def a_worker(name: str = "w", kv_tokens: int = KV) -> WorkerView:
    return replace(a_view(name), kv_capacity=kv_tokens)


def a_scheduler(*views: WorkerView) -> Scheduler:
    scheduler = Scheduler({lane: a_policy() for lane in Lane}, sessions=SessionLimits(PAUSE_S))
    for view in views or (a_worker(),):
        scheduler.observe(view, 0.0)
    return scheduler


def a_call(run: str, step: int = 0, *, tokens: int = 390, at: float = 0.0, **fields: object) -> InferenceJob:
    """400 tokens of KV with its output: two runs fit."""
    tenant = str(fields.pop("tenant", run))
    job = a_job(f"{run}{step}", tokens=tokens, run_id=run, tenant=tenant, at=at, output=10)
    return replace(job, **fields)


def call(scheduler: Scheduler, *jobs: InferenceJob) -> list[str]:
    """Offer calls at their arrival; those that are sent."""
    offer(scheduler, *jobs)
    return sent(scheduler.tick(jobs[-1].arrived_at))


def end(scheduler: Scheduler, *job_ids: str, now: float, prompt: int = 390, cached: int | None = None) -> list[str]:
    """Calls end with that usage; the calls that are sent then."""
    for job_id in job_ids:
        scheduler.progress(job_id, Ended(prompt, cached, 10), now)
    return sent(scheduler.tick(now))


def full(*views: WorkerView) -> Scheduler:
    """The runs a and b are resident, and idle since 1 s."""
    scheduler = a_scheduler(*views)
    assert call(scheduler, a_call("a"), a_call("b")) == ["a0", "b0"]
    end(scheduler, "a0", "b0", now=1.0)
    return scheduler


def test_nothing_pauses_while_the_working_sets_fit() -> None:
    scheduler = full()
    assert call(scheduler, a_call("c", tokens=150, at=2.0), a_call("a", 1, at=2.0)) == ["c0", "a1"]
    assert scheduler.session_counts().pauses == 0


def test_a_run_that_does_not_fit_pauses_while_resident_runs_go_on() -> None:
    scheduler = full()
    assert call(scheduler, a_call("c", at=2.0), a_call("a", 1, at=2.0)) == ["a1"]
    counts = scheduler.session_counts()
    assert (counts.resident, counts.paused) == (2, 1)
    decision = scheduler.decision("c0", 3.0)
    assert decision is not None
    assert (decision.held_by, decision.held_s) == (SESSION_PAUSE, 1.0)


def test_a_pause_ends_when_a_resident_run_has_been_idle_for_too_long() -> None:
    scheduler = full()
    offer(scheduler, a_call("c", at=2.0))
    tick = scheduler.tick(2.0)
    assert tick.wake_at == 1.0 + MAX_KEEP_S
    assert sent(scheduler.tick(tick.wake_at - 0.1)) == []
    assert sent(scheduler.tick(tick.wake_at)) == ["c0"]
    assert scheduler.session_counts().pause_s == pytest.approx(tick.wake_at - 2.0)


def test_a_pause_is_bounded_also_while_every_resident_run_has_a_call() -> None:
    scheduler = full()
    call(scheduler, a_call("a", 1, at=2.0), a_call("b", 1, at=2.0), a_call("c", at=2.0))
    assert sent(scheduler.tick(2.0 + PAUSE_S - 0.1)) == []
    assert sent(scheduler.tick(2.0 + PAUSE_S)) == ["c0"]


def test_after_the_longest_pause_the_run_that_was_idle_longest_leaves() -> None:
    scheduler = full()
    call(scheduler, a_call("a", 1, at=2.0), a_call("b", 1, at=2.0), a_call("c", at=2.0))
    end(scheduler, "a1", now=51.0)
    end(scheduler, "b1", now=51.5)
    assert sent(scheduler.tick(2.0 + PAUSE_S)) == ["c0"]
    assert call(scheduler, a_call("b", 2, at=53.0)) == ["b2"]
    assert call(scheduler, a_call("a", 2, at=53.0)) == []


def test_half_of_the_time_to_its_deadline_bounds_the_pause_of_a_call() -> None:
    scheduler = full()
    call(scheduler, a_call("c", at=2.0, deadline=12.0))
    assert sent(scheduler.tick(6.9)) == []
    assert sent(scheduler.tick(7.0)) == ["c0"]


def test_a_finished_run_makes_room_at_once() -> None:
    scheduler = full()
    call(scheduler, a_call("c", at=2.0))
    scheduler.end_run("a", "a")
    assert sent(scheduler.tick(3.0)) == ["c0"]


@pytest.mark.parametrize(
    "job",
    [
        a_call("c", at=2.0, lane=Lane.P0),
        a_call("c", at=2.0, attempt=2),
        a_call("c", at=2.0, run_id="c0"),
        a_call("c", at=2.0, tenant="a", parent_run="a"),
    ],
    ids=["P0", "a later attempt", "no run", "a sub-run of a resident run"],
)
def test_these_calls_never_pause(job: InferenceJob) -> None:
    assert call(full(), job) == ["c0"]


def test_paused_runs_go_on_in_the_order_of_their_tenants_resident_tokens() -> None:
    scheduler = a_scheduler()
    call(scheduler, a_call("a", tenant="x"), a_call("b", tenant="y", tokens=490))
    end(scheduler, "a0", now=1.0)
    end(scheduler, "b0", now=1.0, prompt=490)
    call(scheduler, a_call("c", at=2.0, tenant="x"), a_call("d", at=2.0, tenant="z"))
    scheduler.end_run("y", "b")
    assert sent(scheduler.tick(3.0)) == ["d0"]


def test_the_resident_tokens_of_a_tenant_count_by_its_weight() -> None:
    """x has 500 tokens at a weight of 5, y has 300 at a weight of 1."""
    lanes = {lane: a_policy() for lane in Lane}
    scheduler = Scheduler(lanes, {"x": 5.0}, sessions=SessionLimits(PAUSE_S))
    scheduler.observe(a_worker(), 0.0)
    call(scheduler, *[a_call(run, tenant="x", tokens=240) for run in "ab"], a_call("c", tenant="y", tokens=290))
    call(scheduler, a_call("d", tenant="w", tokens=190))
    call(scheduler, a_call("e", at=2.0, tenant="y"), a_call("f", at=2.0, tenant="x"))
    for job_id, prompt in (("a0", 240), ("d0", 190)):
        end(scheduler, job_id, now=2.0, prompt=prompt)
    scheduler.end_run("w", "d")
    scheduler.end_run("x", "a")
    assert sent(scheduler.tick(3.0)) == ["f0"]


def test_a_cancelled_call_leaves_its_pause() -> None:
    scheduler = full()
    call(scheduler, a_call("c", at=2.0))
    assert scheduler.cancel("c0") is JobLocation.QUEUED
    assert scheduler.session_counts().paused == 0
    assert sent(scheduler.tick(2.0 + PAUSE_S)) == []
    assert scheduler.queued == 0


def test_paused_calls_go_elsewhere_when_their_worker_is_gone() -> None:
    scheduler = a_scheduler(a_worker("w1"), a_worker("w2", kv_tokens=100))
    call(scheduler, a_call("a"), a_call("b"))
    end(scheduler, "a0", "b0", now=1.0)
    assert call(scheduler, a_call("c", at=2.0), a_call("d", at=2.0), a_call("e", at=2.0)) != ["c0", "d0", "e0"]
    scheduler.forget("w1")
    scheduler.tick(3.0)
    assert scheduler.session_counts().paused <= 1
    scheduler.tick(2.0 + PAUSE_S)
    assert scheduler.queued == 0


def test_a_worker_without_cache_hits_pauses_no_run() -> None:
    scheduler = a_scheduler()
    call(scheduler, a_call("a"), a_call("b"))
    end(scheduler, "a0", "b0", now=0.0, cached=0)
    for step in range(1, MAX_MISSES + 1):
        call(scheduler, a_call("a", step))
        end(scheduler, f"a{step}", now=0.0, cached=0)
    assert call(scheduler, a_call("c", at=1.0)) == ["c0"]


def test_hits_of_runs_that_had_left_raise_what_fits() -> None:
    """Runs that share a prefix take less KV than the sum of their prompts."""
    scheduler = full()
    now = 2.0
    for step in range(1, 60):
        for run in "cdeab":
            call(scheduler, a_call(run, step, at=now))
            now += PAUSE_S
            scheduler.tick(now)
            end(scheduler, f"{run}{step}", now=now, cached=380)
    pauses = scheduler.session_counts().pauses
    assert call(scheduler, *[a_call(run, 99, at=now) for run in "abc"])
    assert pauses < 5 * 59


def test_runs_do_not_pause_where_their_tool_times_are_longer_than_the_engine_needs_to_refill_its_cache() -> None:
    view = a_worker()
    direct = DirectWaits((0.0,) * 3, 0.0, 2048, computed_token_s=0.001)
    scheduler = full(replace(view, capacity=replace(view.capacity, direct=direct)))
    now = 1.0
    for step in range(1, 100):
        now += 5.0
        call(scheduler, a_call("a", step, at=now), a_call("b", step, at=now))
        end(scheduler, f"a{step}", f"b{step}", now=now)
    assert call(scheduler, a_call("c", at=now)) == ["c0"]


def test_without_sessions_no_run_pauses() -> None:
    scheduler = Scheduler({lane: a_policy() for lane in Lane})
    scheduler.observe(a_worker(), 0.0)
    calls = [a_call(f"r{number}") for number in range(5)]
    assert len(call(scheduler, *calls)) == 5
    assert scheduler.session_counts().resident == 0


def test_a_second_tick_at_the_same_time_resumes_no_run() -> None:
    scheduler = full()
    calls = [a_call(run, at=2.0) for run in "cde"]
    offer(scheduler, *calls)
    for at in (2.0, 1.0 + MAX_KEEP_S, 2.0 + PAUSE_S):
        scheduler.tick(at)
        assert sent(scheduler.tick(at)) == []
    assert scheduler.queued == 0


def test_a_paused_call_goes_on_after_workers_have_changed() -> None:
    scheduler = full()
    assert call(scheduler, a_call("c", at=2.0), a_call("a", 1, at=2.0)) == ["a1"]
    scheduler.observe(a_worker("another", kv_tokens=1), 3.0)
    assert sent(scheduler.tick(2.0 + PAUSE_S)) == ["c0"]


def test_embeddings_of_a_run_do_not_change_its_working_set() -> None:
    scheduler = full()
    assert call(scheduler, a_call("a", 1, at=2.0)) == ["a1"]
    one = a_call("a", 2, at=2.0)
    route = replace(one.route, pooled=True)
    pooled = replace(one, route=route, batch_key=replace(one.batch_key, route=route, task=Task.EMBED))
    assert call(scheduler, pooled) == ["a2"]
    end(scheduler, "a2", now=3.0)
    end(scheduler, "a1", now=4.0)
    scheduler.end_run("a", "a")
    assert scheduler.session_counts().resident == 1


def test_a_worker_that_has_not_kept_a_run_is_not_blamed_for_its_misses() -> None:
    """Calls of one run that alternate between two models find nothing cached, however well the workers cache."""
    scheduler = a_scheduler(a_worker(), replace(a_worker("other"), models=frozenset({"n"})))
    call(scheduler, a_call("a"), a_call("b"))
    end(scheduler, "a0", "b0", now=0.0)
    for step in range(1, 2 * MAX_MISSES + 1):
        job = a_call("a", step)
        route = replace(job.route, model="n" if step % 2 else "m")
        call(scheduler, replace(job, route=route, batch_key=replace(job.batch_key, route=route)))
        end(scheduler, f"a{step}", now=0.0, cached=0)
    assert call(scheduler, a_call("c", at=0.5)) == [], "c pauses: the worker may have a cache"
