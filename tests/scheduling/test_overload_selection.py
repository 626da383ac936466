"""Selection under overload: which jobs are passed over, and for how long."""

from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, end, offer, sent
from support.builders import a_job, a_policy, a_view

TTFT_ONE_SECOND = a_policy(ttft_ms=1000.0, itl_ms=50.0)


def a_full_worker() -> Scheduler:
    """One sequence, and somebody has it."""
    scheduler = a_scheduler(a_view(sequences=1), P1=TTFT_ONE_SECOND)
    offer(scheduler, a_job("running", run_id="running"))
    assert sent(scheduler.tick(0.0)) == ["running"]
    return scheduler


def drain_at(scheduler: Scheduler, now: float) -> list[str]:
    """Who goes, one after the other, all at one moment."""
    order: list[str] = []
    end(scheduler, "running", now=now)
    while sent_ids := sent(scheduler.tick(now)):
        order += sent_ids
        end(scheduler, *sent_ids, now=now)
    return order


def test_a_late_job_is_passed_over_for_jobs_that_can_still_meet_the_slo() -> None:
    scheduler = a_full_worker()
    offer(
        scheduler, a_job("late", run_id="1"), a_job("fresh", run_id="2", at=0.9), a_job("fresher", run_id="3", at=1.0)
    )
    assert drain_at(scheduler, 1.2) == ["fresh", "fresher", "late"]


def test_a_job_that_can_meet_its_slo_keeps_fair_order() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("first", run_id="1"), a_job("second", run_id="2", at=0.5))
    assert drain_at(scheduler, 0.9) == ["first", "second"]


def test_a_job_is_passed_over_for_at_most_eight_times_its_ttft_target() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("late", run_id="1"), a_job("fresh", run_id="2", at=8.0))
    assert drain_at(scheduler, 8.1) == ["late", "fresh"]


def test_late_jobs_stay_in_arrival_order() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("late", run_id="1"), a_job("too", run_id="2", at=0.1), a_job("fresh", run_id="3", at=0.9))
    assert drain_at(scheduler, 1.2) == ["fresh", "late", "too"]


def test_a_passed_over_tenant_goes_first_once_no_other_job_can_meet_its_slo() -> None:
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


def test_a_lane_without_slo_keeps_fair_order() -> None:
    scheduler = a_full_worker()
    offer(
        scheduler,
        a_job("old", run_id="1", lane=Lane.P2),
        a_job("new", run_id="2", lane=Lane.P2, at=1.1),
    )
    assert drain_at(scheduler, 1.2) == ["old", "new"]


def test_a_cancelled_job_is_not_selected() -> None:
    scheduler = a_full_worker()
    offer(scheduler, a_job("late", run_id="1"), a_job("gone", run_id="2", at=0.9), a_job("fresh", run_id="3", at=1.0))
    scheduler.cancel("gone")
    assert drain_at(scheduler, 1.2) == ["fresh", "late"]


def test_each_queue_of_a_lane_passes_over_late_jobs_on_its_own() -> None:
    scheduler = a_scheduler(a_view(models=("m", "n"), sequences=1), P1=TTFT_ONE_SECOND)
    offer(scheduler, a_job("running", run_id="running"))
    assert sent(scheduler.tick(0.0)) == ["running"]
    offer(scheduler, a_job("late", run_id="1"), a_job("other", run_id="2", model="n", at=0.9))
    offer(scheduler, a_job("fresh", run_id="3", at=1.0))
    assert drain_at(scheduler, 1.2) == ["fresh", "late", "other"]


def offer_every_100_ms(scheduler: Scheduler, running: str, start: float, jobs: int) -> list[str]:
    """A worker that is done with whatever it has every tenth of a second, from then on."""
    order: list[str] = []
    for n in range(jobs):
        end(scheduler, running, now=start + n / 10)
        (running,) = sent(scheduler.tick(start + n / 10))
        order.append(running)
    return order


def test_under_overload_the_longest_job_is_passed_over() -> None:
    """A thousand tokens a second go. At 0.6 s there is time for 350 tokens more, and the first in order has 600."""
    scheduler = a_full_worker()
    offer(scheduler, *(a_job(f"early-{n}", run_id=f"early-{n}", tokens=100, at=0.001 * n) for n in range(5)))
    offer(scheduler, a_job("long", run_id="long", tokens=600, at=0.01))
    offer(scheduler, *(a_job(f"short-{n}", run_id=f"short-{n}", tokens=100, at=0.02) for n in range(3)))
    sent_ids = offer_every_100_ms(scheduler, "running", 0.1, 9)
    assert sent_ids == [*(f"early-{n}" for n in range(5)), "short-0", "short-1", "short-2", "long"]


def test_without_overload_a_long_job_keeps_fair_order() -> None:
    scheduler = a_full_worker()
    offer(scheduler, *(a_job(f"early-{n}", run_id=f"early-{n}", tokens=100, at=0.001 * n) for n in range(5)))
    offer(scheduler, a_job("long", run_id="long", tokens=250, at=0.01))
    offer(scheduler, a_job("short", run_id="short", tokens=50, at=0.02))
    assert offer_every_100_ms(scheduler, "running", 0.1, 7)[5:] == ["long", "short"]


def test_rates_observed_before_the_overload_are_not_used() -> None:
    """A worker that was slow once is not taken to be slow when the next burst has hardly waited."""
    scheduler = a_full_worker()
    offer(scheduler, *(a_job(f"slow-{n}", run_id=f"slow-{n}", tokens=10, at=0.001 * n) for n in range(8)))
    running = offer_every_100_ms(scheduler, "running", 0.1, 8)[-1]
    offer(scheduler, a_job("long", run_id="long", tokens=5000, at=5.0), a_job("short", run_id="short", at=5.01))
    assert offer_every_100_ms(scheduler, running, 5.1, 2) == ["long", "short"]


def test_a_passed_over_job_returns_to_fair_order_after_eight_times_its_ttft_target() -> None:
    scheduler = a_full_worker()
    offer(scheduler, *(a_job(f"early-{n}", run_id=f"early-{n}", tokens=100, at=0.001 * n) for n in range(5)))
    offer(scheduler, a_job("long", run_id="long", tokens=900, at=0.01))
    running = offer_every_100_ms(scheduler, "running", 0.1, 5)[-1]
    sent_ids: list[str] = []
    for n in range(6, 90):
        now = n / 10
        offer(scheduler, a_job(f"{n}", run_id=f"{n}", tokens=100, at=now - 0.05))
        end(scheduler, running, now=now)
        (running,) = sent(scheduler.tick(now))
        sent_ids.append(running)
    assert 7.9 <= 0.6 + sent_ids.index("long") / 10 <= 8.3


def test_under_lasting_overload_no_job_starves() -> None:
    """Two come for each that goes. If late jobs gave way for good, only the first of each two would ever go."""
    scheduler = a_full_worker()
    sent_ids: list[str] = []
    running = "running"
    for second in range(60):
        offer(scheduler, *(a_job(f"{second}-{n}", run_id=f"{second}-{n}", at=float(second)) for n in range(2)))
        end(scheduler, running, now=float(second))
        (running,) = sent(scheduler.tick(float(second)))
        sent_ids.append(running)
    assert sum(job_id.endswith("-1") for job_id in sent_ids) >= 15


def test_no_job_is_passed_over_before_the_prefill_rate_was_observed_for_ten_periods() -> None:
    def first_sent_at(now: float) -> list[str]:
        """At the rate seen so far the long prompt takes far longer than its target."""
        scheduler = a_full_worker()
        offer(scheduler, a_job("long", run_id="long", tokens=50_000, at=0.0), a_job("short", run_id="short", at=0.01))
        end(scheduler, "running", now=now)
        return sent(scheduler.tick(now))

    assert first_sent_at(0.1) == ["long"]
    assert first_sent_at(0.2) == ["short"]


def test_a_long_prompt_that_is_allowed_more_time_is_not_late_with_the_others() -> None:
    scheduler = a_full_worker()
    allowed = replace(a_job("allowed", run_id="1"), ttft_allowance_s=1.0)
    offer(scheduler, allowed, a_job("late", run_id="2"), a_job("fresh", run_id="3", at=0.9))
    assert drain_at(scheduler, 1.2) == ["allowed", "fresh", "late"]
