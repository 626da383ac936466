"""Preemption of running jobs, and late messages of earlier attempts."""

import pytest

from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended, FirstToken, JobLocation, Produced, Tick
from inferry.scheduling.preemption import MIN_PROGRESS_TOKENS, OVERRUN_FACTOR
from inferry.scheduling.queues.queued_job import MAX_PREEMPTIONS
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, depths, end, expired, first_token, offer, placements, sent
from support.builders import a_job, a_policy, a_view

LANES = {"P0": a_policy(may_preempt=(Lane.P2,)), "P2": a_policy(preemptible=True)}


def a_batch(job_id: str, **shape: object) -> InferenceJob:
    return a_job(job_id, **({"lane": Lane.P2, "resume": ResumeMode.CONTINUE} | shape))  # type: ignore[arg-type]


def full(*jobs: InferenceJob, written: int = MIN_PROGRESS_TOKENS, **capacity: int) -> Scheduler:
    """One worker on which these jobs run, each with so many tokens written."""
    scheduler = a_scheduler(a_view("w", **capacity), **LANES)  # type: ignore[arg-type]
    offer(scheduler, *jobs)
    assert len(sent(scheduler.tick(0.0))) == len(jobs)
    if written:
        for job in jobs:
            scheduler.progress(job.job_id, FirstToken(), 0.0)
            scheduler.progress(job.job_id, Produced(written), 0.0)
    return scheduler


def full_of_own_lane(written: int, **capacity: int) -> Scheduler:
    """Two jobs run, each with that many of the 100 tokens that were predicted."""
    policy = a_policy(may_preempt=(Lane.P2,), preemptible=True)
    scheduler = a_scheduler(a_view("w", sequences=2, **capacity), P2=policy)  # type: ignore[arg-type]
    jobs = [a_batch("1", output=100), a_batch("2", output=100)]
    offer(scheduler, *jobs)
    assert len(sent(scheduler.tick(0.0))) == 2
    for job in jobs:
        scheduler.progress(job.job_id, FirstToken(), 0.0)
    scheduler.progress("1", Produced(written), 0.0)
    return scheduler


def evicted(tick: Tick) -> list[str]:
    return [job.job_id for job in tick.evictions]


@pytest.mark.parametrize("capacity", [{"sequences": 2}, {"kv_tokens": 120}], ids=["sequences", "kv"])
def test_a_blocked_head_stops_a_batch_job_and_goes_when_that_has_ended(capacity: dict[str, int]) -> None:
    scheduler = full(a_batch("1"), a_batch("2"), **capacity)
    offer(scheduler, a_job("live", lane=Lane.P0))
    tick = scheduler.tick(0.0)
    assert (sent(tick), evicted(tick)) == ([], ["2"])
    assert depths(scheduler)[Lane.P0] == 1
    assert evicted(scheduler.tick(0.0)) == []
    end(scheduler, "2")
    assert placements(scheduler.tick(0.0)) == {"live": "w"}
    assert depths(scheduler)[Lane.P0] == 0


def test_capacity_freed_for_a_head_is_reserved_for_it() -> None:
    scheduler = full(a_batch("1"), a_batch("2"), sequences=2)
    offer(scheduler, a_job("live", lane=Lane.P0, tenant="a"))
    scheduler.tick(0.0)
    offer(scheduler, a_job("later", lane=Lane.P0, tenant="b"), a_job("p1"))
    tick = scheduler.tick(0.0)
    assert evicted(tick) == ["1"]
    end(scheduler, "2")
    assert sent(scheduler.tick(0.0)) == ["live"]
    end(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == ["later"]


def test_the_least_work_is_lost() -> None:
    scheduler = full(a_batch("1"), a_batch("2"), a_batch("3"), sequences=3)
    scheduler.progress("1", Produced(5), 0.0)
    scheduler.progress("3", Produced(10), 0.0)
    offer(scheduler, a_job("live", lane=Lane.P0))
    assert evicted(scheduler.tick(0.0)) == ["2"]


def test_no_more_jobs_are_preempted_than_needed() -> None:
    scheduler = full(
        a_batch("small", tokens=20), a_batch("mid", tokens=60), a_batch("large", tokens=200), kv_tokens=320
    )
    offer(scheduler, a_job("live", tokens=190, lane=Lane.P0))
    assert evicted(scheduler.tick(0.0)) == ["large"]


@pytest.mark.parametrize(
    ("shape", "written", "stopped"),
    [
        ({"resume": ResumeMode.RESTART}, MIN_PROGRESS_TOKENS, False),
        ({"resume": ResumeMode.RESTART}, 0, True),
        ({"resume": ResumeMode.CONTINUE}, MIN_PROGRESS_TOKENS - 1, False),
        ({"resume": ResumeMode.CONTINUE}, MIN_PROGRESS_TOKENS, True),
        ({"preemptions": MAX_PREEMPTIONS - 1}, MIN_PROGRESS_TOKENS, True),
        ({"preemptions": MAX_PREEMPTIONS}, MIN_PROGRESS_TOKENS, False),
        ({"lane": Lane.P1}, MIN_PROGRESS_TOKENS, False),
    ],
)
def test_which_jobs_may_be_preempted(shape: dict[str, object], written: int, stopped: bool) -> None:
    scheduler = full(a_batch("batch", **shape), written=written, sequences=1)
    offer(scheduler, a_job("live", lane=Lane.P0))
    assert evicted(scheduler.tick(0.0)) == (["batch"] if stopped else [])


def test_no_job_is_preempted_for_prefill() -> None:
    scheduler = full(a_batch("1"), a_batch("2"), written=0, prefill_tokens=100)
    offer(scheduler, a_job("live", lane=Lane.P0))
    assert evicted(scheduler.tick(0.0)) == []


def test_no_job_is_preempted_while_another_worker_is_only_prefilling() -> None:
    scheduler = full(a_batch("1"), sequences=1)
    scheduler.observe(a_view("v", prefill_tokens=50), 0.0)
    offer(scheduler, a_job("p0", lane=Lane.P0), a_job("live", lane=Lane.P0))
    tick = scheduler.tick(0.0)
    assert (placements(tick), evicted(tick)) == ({"p0": "v"}, [])


def test_lanes_that_may_not_preempt_wait() -> None:
    scheduler = full(a_batch("1"), sequences=1)
    offer(scheduler, a_job("p1"))
    assert evicted(scheduler.tick(0.0)) == []


def test_victims_are_taken_on_one_worker() -> None:
    scheduler = a_scheduler(a_view("x", kv_tokens=200), a_view("y", kv_tokens=200), **LANES)
    offer(scheduler, *(a_batch(f"{n}", tokens=90, output=10) for n in range(4)))
    homes = placements(scheduler.tick(0.0))
    offer(scheduler, a_job("live", tokens=150, output=10, lane=Lane.P0))
    victims = evicted(scheduler.tick(0.0))
    assert len(victims) == 2
    assert len({homes[name] for name in victims}) == 1


def test_several_heads_are_served_at_once() -> None:
    scheduler = full(*(a_batch(f"{n}") for n in range(4)), sequences=4)
    offer(scheduler, *(a_job(f"live-{n}", lane=Lane.P0) for n in range(3)))
    victims = evicted(scheduler.tick(0.0))
    assert len(victims) == 3
    end(scheduler, *victims)
    assert sent(scheduler.tick(0.0)) == ["live-0", "live-1", "live-2"]


def test_a_nominated_job_can_be_cancelled_and_can_expire() -> None:
    scheduler = full(a_batch("1"), a_batch("2"), sequences=2)
    offer(scheduler, a_job("x", lane=Lane.P0), a_job("y", lane=Lane.P0, deadline=1.0))
    assert len(evicted(scheduler.tick(0.0))) == 2
    assert scheduler.cancel("x") is JobLocation.QUEUED
    assert expired(scheduler.tick(1.0)) == ["y"]
    end(scheduler, "1", "2")
    assert scheduler.use("w").sequences == 0
    assert (scheduler.queued, scheduler.in_flight) == (0, 0)


def test_a_nomination_is_revoked_when_its_worker_changes() -> None:
    scheduler = full(a_batch("1"), sequences=1)
    offer(scheduler, a_job("live", lane=Lane.P0))
    assert evicted(scheduler.tick(0.0)) == ["1"]
    scheduler.forget("w")
    scheduler.observe(a_view("v", sequences=1), 0.0)
    assert placements(scheduler.tick(0.0)) == {"live": "v"}


def test_a_preempted_job_returns_to_its_old_place() -> None:
    scheduler = full(a_batch("1", at=0.0), sequences=1)
    offer(scheduler, a_job("live", lane=Lane.P0), a_batch("2", at=0.5))
    scheduler.tick(1.0)
    end(scheduler, "1", now=1.0)
    offer(scheduler, a_batch("1", at=0.0, attempt=2), now=1.0)
    assert sent(scheduler.tick(1.0)) == ["live"]
    end(scheduler, "live", now=2.0)
    assert sent(scheduler.tick(2.0)) == ["1"]


def test_a_late_end_of_an_earlier_attempt_frees_nothing() -> None:
    scheduler = a_scheduler(a_view("w", sequences=1))
    offer(scheduler, a_job("1", attempt=2))
    scheduler.tick(0.0)
    for step in (FirstToken(), Produced(5), Ended()):
        scheduler.progress("1", step, 0.0, attempt=1)
    assert scheduler.use("w").prefill_tokens == 50
    assert scheduler.service() == {"a": 50}
    scheduler.progress("1", Ended(), 0.0, attempt=2)
    assert scheduler.in_flight == 0


def test_the_end_of_a_nominated_job_is_a_late_message() -> None:
    scheduler = full(a_batch("1"), sequences=1)
    offer(scheduler, a_job("live", lane=Lane.P0))
    scheduler.tick(0.0)
    first_token(scheduler, "live")
    end(scheduler, "live")
    assert scheduler.queued == 1


def test_a_job_that_arrives_with_a_fulfilled_nomination_is_sent_beside_it() -> None:
    scheduler = full(a_batch("1"), sequences=1)
    offer(scheduler, a_job("live", lane=Lane.P0))
    assert evicted(scheduler.tick(0.0)) == ["1"]
    scheduler.observe(a_view("v", sequences=1), 0.0)
    scheduler.tick(0.0)
    end(scheduler, "1")
    offer(scheduler, a_job("other", lane=Lane.P0))
    assert placements(scheduler.tick(0.0)) == {"live": "w", "other": "v"}


def test_a_job_with_a_revoked_nomination_keeps_its_route() -> None:
    scheduler = full(a_batch("1"), sequences=1)
    offer(scheduler, a_job("live", lane=Lane.P0))
    assert evicted(scheduler.tick(0.0)) == ["1"]
    scheduler.observe(a_view("v", models=("n",)), 0.0)
    scheduler.observe(a_view("w", models=("n",), sequences=1), 0.0)
    end(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == []
    scheduler.observe(a_view("u"), 0.0)
    assert placements(scheduler.tick(0.0)) == {"live": "u"}


def test_a_job_that_has_written_far_more_than_predicted_yields_to_one_of_its_lane() -> None:
    scheduler = full_of_own_lane(OVERRUN_FACTOR * 100 + 1)
    offer(scheduler, a_batch("short"), a_batch("later"))
    assert evicted(scheduler.tick(0.0)) == ["1"]
    end(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == ["short"]


def test_a_job_within_its_prediction_does_not_yield_to_its_own_lane() -> None:
    scheduler = full_of_own_lane(OVERRUN_FACTOR * 100)
    offer(scheduler, a_batch("short"))
    assert evicted(scheduler.tick(0.0)) == []
    scheduler.progress("1", Produced(1), 0.0)
    end(scheduler, "2")
    assert sent(scheduler.tick(0.0)) == ["short"]  # no job yields where the end of another is enough


def test_a_lane_that_does_not_name_itself_keeps_its_long_jobs() -> None:
    scheduler = full(a_batch("1"), a_batch("2"), sequences=2, written=10_000)
    offer(scheduler, a_batch("short"))
    assert evicted(scheduler.tick(0.0)) == []


@pytest.mark.parametrize(("written", "yields"), [(MIN_PROGRESS_TOKENS, []), (OVERRUN_FACTOR * 100 + 1, ["1"])])
def test_preemption_keeps_the_limit_of_batch_jobs(written: int, yields: list[str]) -> None:
    policy = a_policy(may_preempt=(Lane.P2,), preemptible=True)
    scheduler = a_scheduler(a_view("w", sequences=4, batch_sequences=1), P2=policy)
    offer(scheduler, a_batch("1", output=100))
    assert sent(scheduler.tick(0.0)) == ["1"]
    scheduler.progress("1", FirstToken(), 0.0)
    scheduler.progress("1", Produced(written), 0.0)
    offer(scheduler, a_batch("2"))
    tick = scheduler.tick(0.0)
    assert (sent(tick), evicted(tick)) == ([], yields)
    offer(scheduler, a_batch("3"))
    assert sent(scheduler.tick(1.0)) == []
    end(scheduler, "1")
    assert sent(scheduler.tick(2.0)) == ["2"]
