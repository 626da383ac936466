"""Statistics of the scheduler: jobs ahead, and fairness."""

import pytest

from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended, QueuedAhead
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, end, offer, sent
from support.builders import a_job, a_policy, a_view


def test_jobs_of_the_lane_and_of_higher_lanes_are_ahead() -> None:
    scheduler = a_scheduler()
    offer(scheduler, a_job(tokens=100, output=10, lane=Lane.P0), a_job(tokens=200, cached=50, output=20))
    offer(scheduler, a_job(tokens=400, output=40, lane=Lane.P2))
    assert scheduler.ahead(Lane.P0) == QueuedAhead(1, 100, 10)
    assert scheduler.ahead(Lane.P1) == QueuedAhead(2, 250, 30)
    assert scheduler.ahead(Lane.P2) == QueuedAhead(3, 650, 70)


def test_a_removed_job_is_not_counted_as_ahead() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("sent", tokens=100, output=10), a_job("stays", tokens=20, output=2, prefix=("p",)))
    offer(scheduler, a_job("cancelled", tokens=30), a_job("expires", tokens=40, deadline=1.0))
    assert sent(scheduler.tick(0.0)) == ["sent"]
    scheduler.cancel("cancelled")
    scheduler.tick(1.0)
    assert scheduler.ahead(Lane.P2) == QueuedAhead(1, 20, 2)
    end(scheduler, "sent", now=1.0)
    assert sent(scheduler.tick(1.0)) == ["stays"]
    assert scheduler.ahead(Lane.P2) == QueuedAhead()


def test_held_jobs_count_as_ahead() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", coalesce_ms=10))
    offer(scheduler, a_job(tokens=100, output=10))
    scheduler.tick(0.0)
    assert scheduler.ahead(Lane.P1) == QueuedAhead(1, 100, 10)


def test_jobs_ahead_of_a_tenant_follow_fair_share() -> None:
    scheduler = Scheduler({Lane.P1: a_policy()}, {"c": 2.0})
    offer(scheduler, *(a_job(tokens=100, output=10, tenant="a") for _ in range(20)))
    assert scheduler.ahead(Lane.P1, "a") == scheduler.ahead(Lane.P1) == QueuedAhead(20, 2_000, 200)
    offer(scheduler, *(a_job(tokens=100, output=10, tenant="b") for _ in range(3)))
    assert scheduler.ahead(Lane.P1, "b") == QueuedAhead(6, 600, 60)
    assert scheduler.ahead(Lane.P1, "a") == QueuedAhead(23, 2_300, 230)
    assert scheduler.ahead(Lane.P1, "nobody") == QueuedAhead()
    offer(scheduler, *(a_job(tokens=100, output=10, tenant="c") for _ in range(3)))
    assert scheduler.ahead(Lane.P1, "c") == QueuedAhead(6, 600, 60)


def test_all_jobs_of_higher_lanes_are_ahead() -> None:
    scheduler = a_scheduler()
    offer(scheduler, a_job(tokens=100, output=10, lane=Lane.P0, tenant="a"))
    assert scheduler.ahead(Lane.P2, "b") == QueuedAhead(1, 100, 10)


def test_jobs_that_want_other_workers_are_no_rivals() -> None:
    scheduler = a_scheduler(a_view("a", models=("m",), sequences=1), a_view("b", models=("other",)))
    offer(scheduler, a_job("first", model="m"), a_job("second", model="m"), a_job("third", model="other"))
    assert sorted(sent(scheduler.tick(0.0))) == ["first", "third"]
    assert scheduler.has_rivals(a_job(model="m"))
    assert not scheduler.has_rivals(a_job(model="other"))


@pytest.mark.parametrize("lane", [None, Lane.P1])
def test_jains_index_is_over_tenants_that_have_work(lane: Lane | None) -> None:
    scheduler = Scheduler({Lane.P1: a_policy()}, {"b": 2.0})
    scheduler.observe(a_view(sequences=8), 0.0)
    assert scheduler.jain_index(lane) == 1.0
    offer(scheduler, a_job("a", tenant="a", tokens=100), a_job("b", tenant="b", tokens=200))
    offer(scheduler, a_job("c", tenant="c", tokens=900))
    scheduler.tick(0.0)
    assert scheduler.jain_index(lane) == pytest.approx(1_100**2 / (3 * (100**2 + 100**2 + 900**2)))
    scheduler.progress("c", Ended(), 0.0)
    assert scheduler.jain_index(lane) == 1.0
    assert scheduler.jain_index(Lane.P0) == 1.0
