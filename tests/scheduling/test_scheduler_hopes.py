"""Who goes before a job that has lost its first-token promise, and for how long."""

from inferry.domain.jobs import Lane
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, end, offer, sent
from support.builders import a_job, a_policy, a_view

PROMISES_A_SECOND = a_policy(ttft_ms=1000.0, gap_ms=50.0)


def a_full_worker() -> Scheduler:
    """One sequence, and somebody has it."""
    scheduler = a_scheduler(a_view(sequences=1), P1=PROMISES_A_SECOND)
    offer(scheduler, a_job("running", run_id="running"))
    assert sent(scheduler.tick(0.0)) == ["running"]
    return scheduler


def drain_at(scheduler: Scheduler, now: float) -> list[str]:
    """Who goes, one after the other, all at one moment."""
    order: list[str] = []
    end(scheduler, "running", now=now)
    while went := sent(scheduler.tick(now)):
        order += went
        end(scheduler, *went, now=now)
    return order


def test_a_job_that_is_late_lets_those_go_first_who_can_be_in_time() -> None:
    scheduler = a_full_worker()
    offer(
        scheduler, a_job("late", run_id="1"), a_job("fresh", run_id="2", at=0.9), a_job("fresher", run_id="3", at=1.0)
    )
    assert drain_at(scheduler, 1.2) == ["fresh", "fresher", "late"]


def test_while_a_promise_can_be_kept_its_turn_is_kept_too() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("first", run_id="1"), a_job("second", run_id="2", at=0.5))
    assert drain_at(scheduler, 0.9) == ["first", "second"]


def test_nobody_gives_way_for_longer_than_twice_its_promise() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("late", run_id="1"), a_job("fresh", run_id="2", at=2.0))
    assert drain_at(scheduler, 2.1) == ["late", "fresh"]


def test_who_is_late_as_well_does_not_go_before_an_older_one() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("late", run_id="1"), a_job("too", run_id="2", at=0.1), a_job("fresh", run_id="3", at=0.9))
    assert drain_at(scheduler, 1.2) == ["fresh", "late", "too"]


def test_a_tenant_that_gave_way_goes_first_when_nobody_else_can_be_in_time() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("served", tenant="b", run_id="1", tokens=500))
    end(scheduler, "running", now=0.1)
    assert sent(scheduler.tick(0.1)) == ["served"]
    offer(scheduler, a_job("behind", tenant="b", run_id="2", at=0.15), a_job("owed", tenant="c", run_id="3", at=0.2))
    offer(scheduler, a_job("fresh", tenant="b", run_id="4", at=1.2))
    end(scheduler, "served", now=1.3)
    assert sent(scheduler.tick(1.3)) == ["fresh"]
    end(scheduler, "fresh", now=1.3)
    assert sent(scheduler.tick(1.3)) == ["owed"]


def test_a_lane_that_promises_nothing_keeps_its_order() -> None:
    scheduler = a_full_worker()
    offer(
        scheduler,
        a_job("old", run_id="1", lane=Lane.P2),
        a_job("new", run_id="2", lane=Lane.P2, at=1.1),
    )
    assert drain_at(scheduler, 1.2) == ["old", "new"]


def test_somebody_who_left_is_not_waited_for() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("late", run_id="1"), a_job("gone", run_id="2", at=0.9), a_job("fresh", run_id="3", at=1.0))
    scheduler.cancel("gone")
    assert drain_at(scheduler, 1.2) == ["fresh", "late"]


def test_queues_of_one_lane_give_way_each_in_its_own_place() -> None:
    scheduler = a_scheduler(a_view(models=("m", "n"), sequences=1), P1=PROMISES_A_SECOND)
    offer(scheduler, a_job("running", run_id="running"))
    assert sent(scheduler.tick(0.0)) == ["running"]
    offer(scheduler, a_job("late", run_id="1"), a_job("other", run_id="2", model="n", at=0.9))
    offer(scheduler, a_job("fresh", run_id="3", at=1.0))
    assert drain_at(scheduler, 1.2) == ["fresh", "late", "other"]


def test_under_lasting_overload_giving_way_starves_nobody() -> None:
    """Two come for each that goes. If late jobs gave way for good, only the first of each two would ever go."""
    scheduler = a_full_worker()
    went: list[str] = []
    running = "running"
    for second in range(60):
        offer(scheduler, *(a_job(f"{second}-{n}", run_id=f"{second}-{n}", at=float(second)) for n in range(2)))
        end(scheduler, running, now=float(second))
        (running,) = sent(scheduler.tick(float(second)))
        went.append(running)
    assert sum(job_id.endswith("-1") for job_id in went) >= 15
