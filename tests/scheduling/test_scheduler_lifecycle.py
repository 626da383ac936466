"""Offers, cancels, worker views and progress: the location of every job, and capacity in use."""

import pytest

from inferry.domain.errors import QueueFull
from inferry.domain.lanes import Lane
from inferry.domain.plans import CapacityUse, JobLocation
from inferry.domain.routes import RouteKey
from inferry.domain.workers import Load, Phase
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, depths, end, expired, first_token, offer, sent
from support.builders import a_job, a_policy, a_view


def test_a_job_that_fits_is_sent_at_the_next_tick() -> None:
    scheduler = a_scheduler(a_view("w"))
    job = a_job("j")
    offer(scheduler, job)
    (plan,) = scheduler.tick(3.0).plans
    assert (plan.worker, plan.jobs, plan.formed_at, plan.padded_tokens) == ("w", (job,), 3.0, None)
    assert (scheduler.queued, scheduler.in_flight) == (0, 1)


def test_plan_ids_are_never_used_twice() -> None:
    scheduler = a_scheduler(a_view("a", sequences=1), a_view("b", sequences=1))
    offer(scheduler, a_job("1"), a_job("2"), a_job("3"))
    ids = [plan.plan_id for plan in scheduler.tick(0.0).plans]
    end(scheduler, "1", "2")
    ids += [plan.plan_id for plan in scheduler.tick(0.0).plans]
    assert len(ids) == len(set(ids)) == 3


def test_a_full_lane_refuses_and_other_lanes_do_not() -> None:
    scheduler = a_scheduler(P1=a_policy(queue_limit=2))
    offer(scheduler, a_job("1"), a_job("2"))
    with pytest.raises(QueueFull):
        offer(scheduler, a_job("3"))
    offer(scheduler, a_job("4", lane=Lane.P0))
    assert depths(scheduler) == {Lane.P0: 1, Lane.P1: 2, Lane.P2: 0}


def test_a_refused_job_leaves_no_state() -> None:
    scheduler = a_scheduler(P1=a_policy(queue_limit=1))
    offer(scheduler, a_job("1"))
    with pytest.raises(QueueFull):
        offer(scheduler, a_job("2"))
    assert scheduler.cancel("2") is JobLocation.UNKNOWN
    assert scheduler.cancel("1") is JobLocation.QUEUED
    offer(scheduler, a_job("2"))
    assert scheduler.queued == 1


def test_a_job_that_was_admitted_before_is_queued_beyond_the_limit() -> None:
    scheduler = a_scheduler(P1=a_policy(queue_limit=1))
    scheduler.offer(a_job("a"), 0.0)
    scheduler.offer(a_job("b"), 0.0, is_admitted=True)
    with pytest.raises(QueueFull):
        scheduler.offer(a_job("c"), 0.0)


def test_held_jobs_count_towards_the_queue_limit() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", queue_limit=1))
    offer(scheduler, a_job("1"))
    with pytest.raises(QueueFull):
        offer(scheduler, a_job("2"))


def test_offering_a_job_twice_is_a_programming_error() -> None:
    scheduler = a_scheduler(a_view())
    offer(scheduler, a_job("1"))
    with pytest.raises(ValueError, match="already"):
        offer(scheduler, a_job("1"))
    scheduler.tick(0.0)
    with pytest.raises(ValueError, match="already"):
        offer(scheduler, a_job("1"))


def test_an_ended_job_may_be_offered_again_and_takes_its_old_place() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("old", at=0.0), a_job("new", at=1.0))
    assert sent(scheduler.tick(1.0)) == ["old"]
    end(scheduler, "old", now=2.0)
    offer(scheduler, a_job("old", at=0.0, attempt=2), now=2.0)
    assert sent(scheduler.tick(2.0)) == ["old"]


def test_a_cancelled_queued_job_is_never_dispatched() -> None:
    scheduler = a_scheduler(a_view())
    offer(scheduler, a_job("1"), a_job("2"), a_job("3"))
    assert scheduler.cancel("2") is JobLocation.QUEUED
    assert scheduler.cancel("2") is JobLocation.UNKNOWN
    assert sent(scheduler.tick(0.0)) == ["1", "3"]


def test_a_cancelled_head_lets_the_next_one_go() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=100))
    offer(scheduler, a_job("running", tokens=60), a_job("large", tokens=90), a_job("small", tokens=40))
    assert sent(scheduler.tick(0.0)) == ["running"]
    scheduler.cancel("large")
    assert sent(scheduler.tick(0.0)) == ["small"]


def test_a_held_job_can_be_cancelled() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", coalesce_ms=10))
    offer(scheduler, a_job("1"), a_job("2"))
    assert scheduler.cancel("1") is JobLocation.QUEUED
    assert sent(scheduler.tick(0.01)) == ["2"]


def test_a_cancelled_planned_job_counts_until_it_has_ended() -> None:
    scheduler = a_scheduler(a_view("w", sequences=1))
    offer(scheduler, a_job("1"), a_job("2"))
    scheduler.tick(0.0)
    assert scheduler.cancel("1") is JobLocation.PLANNED
    assert sent(scheduler.tick(0.0)) == []
    end(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_thousands_of_cancels_leave_the_others_in_order() -> None:
    scheduler = a_scheduler()
    offer(scheduler, *(a_job(f"{n}", deadline=1e6) for n in range(1000)))
    for n in range(1000):
        if n % 10:
            scheduler.cancel(f"{n}")
    scheduler.observe(a_view(), 0.0)
    assert sent(scheduler.tick(0.0)) == [f"{n}" for n in range(0, 1000, 10)]


def test_the_first_token_frees_the_prefill_and_the_end_frees_the_rest() -> None:
    scheduler = a_scheduler(a_view("w"))
    offer(scheduler, a_job("1", tokens=100, cached=40, output=10))
    scheduler.tick(0.0)
    assert scheduler.use("w") == CapacityUse(1, 110, 60)
    first_token(scheduler, "1")
    assert scheduler.use("w") == CapacityUse(1, 110, 0)
    end(scheduler, "1")
    assert scheduler.use("w") == CapacityUse()
    assert scheduler.in_flight == 0


def test_a_job_that_ends_without_a_first_token_frees_its_prefill_too() -> None:
    scheduler = a_scheduler(a_view("w"))
    offer(scheduler, a_job("1"))
    scheduler.tick(0.0)
    end(scheduler, "1")
    assert scheduler.use("w") == CapacityUse()


def test_late_and_repeated_progress_changes_nothing() -> None:
    scheduler = a_scheduler(a_view("w"))
    offer(scheduler, a_job("1"), a_job("2"))
    scheduler.tick(0.0)
    for _ in range(2):
        first_token(scheduler, "1", "unknown")
    for _ in range(2):
        end(scheduler, "1", "unknown")
    first_token(scheduler, "1")
    assert scheduler.use("w") == CapacityUse(1, 60, 50)


def test_progress_of_a_queued_job_is_a_late_message_of_an_earlier_attempt() -> None:
    scheduler = a_scheduler()
    offer(scheduler, a_job("1"))
    first_token(scheduler, "1")
    end(scheduler, "1")
    assert scheduler.queued == 1


def test_a_job_past_its_deadline_is_never_dispatched() -> None:
    scheduler = a_scheduler(a_view())
    offer(scheduler, a_job("1", deadline=5.0))
    tick = scheduler.tick(5.0)
    assert (sent(tick), expired(tick)) == ([], ["1"])
    assert expired(scheduler.tick(6.0)) == []
    assert scheduler.queued == 0


def test_a_planned_job_does_not_expire() -> None:
    scheduler = a_scheduler(a_view())
    offer(scheduler, a_job("1", deadline=5.0))
    scheduler.tick(0.0)
    tick = scheduler.tick(5.0)
    assert (expired(tick), tick.wake_at) == ([], None)


def test_max_wait_never_expires_a_job() -> None:
    scheduler = a_scheduler()
    offer(scheduler, a_job("1", max_wait_s=0.1))
    assert expired(scheduler.tick(1000.0)) == []
    assert scheduler.queued == 1


def test_jobs_expire_in_order_of_their_deadlines() -> None:
    scheduler = a_scheduler()
    offer(scheduler, a_job("late", deadline=3.0), a_job("soon", deadline=1.0), a_job("never"))
    assert expired(scheduler.tick(4.0)) == ["soon", "late"]


def test_an_expired_head_lets_the_next_one_go() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=100))
    offer(scheduler, a_job("running", tokens=60))
    offer(scheduler, a_job("large", tokens=90, deadline=1.0), a_job("small", tokens=40))
    scheduler.tick(0.0)
    tick = scheduler.tick(1.0)
    assert (expired(tick), sent(tick)) == (["large"], ["small"])


def test_the_next_wake_up_is_the_earliest_deadline_of_a_queued_job() -> None:
    scheduler = a_scheduler()
    offer(scheduler, a_job("1", deadline=7.0), a_job("2", deadline=3.0))
    assert scheduler.tick(0.0).wake_at == 3.0
    scheduler.cancel("2")
    assert scheduler.tick(0.0).wake_at == 7.0
    scheduler.cancel("1")
    assert scheduler.tick(0.0).wake_at is None


def test_the_wake_up_is_always_in_the_future() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", coalesce_ms=10))
    offer(scheduler, a_job("1", at=0.0, deadline=1.0), a_job("2", at=0.005), now=0.5)
    tick = scheduler.tick(0.5)
    assert tick.wake_at is None
    assert sent(tick) == ["1", "2"]


def test_a_second_tick_at_one_instant_decides_nothing() -> None:
    scheduler = a_scheduler(a_view(sequences=2))
    offer(scheduler, *(a_job(f"{n}") for n in range(5)))
    assert sent(scheduler.tick(0.0)) == ["0", "1"]
    assert scheduler.tick(0.0).plans == ()


def test_a_forgotten_worker_gets_nothing_and_its_jobs_stay_counted() -> None:
    scheduler = a_scheduler(a_view("w", sequences=1))
    offer(scheduler, a_job("1"), a_job("2"))
    scheduler.tick(0.0)
    scheduler.forget("w")
    assert scheduler.use("w") == CapacityUse(1, 60, 50)
    assert sent(scheduler.tick(0.0)) == []
    scheduler.observe(a_view("w", sequences=1), 0.0)
    assert sent(scheduler.tick(0.0)) == []
    end(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_a_job_may_end_on_a_forgotten_worker() -> None:
    scheduler = a_scheduler(a_view("w"))
    offer(scheduler, a_job("1"))
    scheduler.tick(0.0)
    scheduler.forget("w")
    scheduler.forget("w")
    scheduler.forget("never-seen")
    end(scheduler, "1")
    assert (scheduler.in_flight, scheduler.use("w")) == (0, CapacityUse())
    scheduler.observe(a_view("w"), 0.0)
    offer(scheduler, a_job("2"))
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_a_new_view_replaces_the_old_one_and_keeps_jobs_in_flight() -> None:
    scheduler = a_scheduler(a_view("w", sequences=2, foreign=Load(running=1)))
    offer(scheduler, a_job("1"), a_job("2"))
    assert sent(scheduler.tick(0.0)) == ["1"]
    scheduler.observe(a_view("w", sequences=2), 1.0)
    assert scheduler.use("w") == CapacityUse(1, 60, 50)
    assert sent(scheduler.tick(1.0)) == ["2"]


def test_a_capacity_below_current_use_admits_no_job_until_enough_have_ended() -> None:
    scheduler = a_scheduler(a_view("w", sequences=3))
    offer(scheduler, *(a_job(f"{n}") for n in range(4)))
    scheduler.tick(0.0)
    scheduler.observe(a_view("w", sequences=1), 0.0)
    end(scheduler, "0", "1")
    assert sent(scheduler.tick(0.0)) == []
    end(scheduler, "2")
    assert sent(scheduler.tick(0.0)) == ["3"]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING, Phase.DOWN])
def test_only_a_ready_worker_gets_work(phase: Phase) -> None:
    scheduler = a_scheduler(a_view("w", phase=phase))
    offer(scheduler, a_job("1"))
    assert sent(scheduler.tick(0.0)) == []
    assert scheduler.has_route(RouteKey("m"))
    scheduler.observe(a_view("w"), 0.0)
    assert sent(scheduler.tick(0.0)) == ["1"]


def test_an_unserved_route_is_reported_absent() -> None:
    scheduler = a_scheduler(a_view(models=("m",), adapters=("x",)))
    assert scheduler.has_route(RouteKey("m"))
    assert scheduler.has_route(RouteKey("m", adapter="x"))
    assert not scheduler.has_route(RouteKey("other"))
    assert not scheduler.has_route(RouteKey("m", adapter="y"))


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_is_a_part_of_the_whole(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Scheduler({Lane.P2: a_policy(share=share)})


def test_a_retried_job_is_admitted_to_a_full_lane() -> None:
    scheduler = a_scheduler(P1=a_policy(queue_limit=1))
    offer(scheduler, a_job("1"))
    offer(scheduler, a_job("lost", attempt=2))
    assert scheduler.queued == 2
    with pytest.raises(QueueFull):
        offer(scheduler, a_job("2"))
