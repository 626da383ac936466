"""The predicted KV peak: `kv_packing: timed` against looking at every step, and what the scheduler makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.jobs import ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.plans import Produced
from inferry.domain.workers import KvPacking, Load
from inferry.scheduling.capacity.kv_peak import KvPeakTracker
from inferry.scheduling.lane_rules import LaneRules
from inferry.scheduling.queues.fair_share import LaneAccounts, weight_lookup
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, end, first_token, offer, sent
from support.builders import a_job, a_policy, a_view

RULES = LaneRules(Lane.P1, a_policy())
RUN = LaneAccounts(weight_lookup({}), lambda tenant, tokens: None).open_run("a", "run")
JOBS = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300), st.integers(0, 400)), max_size=12)
"""Prompt tokens, expected output tokens, output tokens so far."""


def entry(prompt: int, output: int, produced: int = 0) -> QueuedJob:
    job = a_job(tokens=prompt, output=output)
    queued = QueuedJob(job, 1, RULES, (0, job.route), RUN)
    queued.produced = produced
    return queued


def tracker(jobs: list[tuple[int, int, int]]) -> KvPeakTracker:
    kv_peaks = KvPeakTracker(1000)
    for job in jobs:
        kv_peaks.add(entry(*job))
    return kv_peaks


def held_at(jobs: list[tuple[int, int, int]], step: int) -> int:
    """Every job holds its KV up to the step of its last token; a job past its prediction holds it for good."""
    return sum(
        prompt + produced + (step if produced < output else 0)
        for prompt, output, produced in jobs
        if step <= output - produced or produced >= output
    )


@given(JOBS)
def test_the_peak_is_the_most_that_is_held_at_any_step(jobs: list[tuple[int, int, int]]) -> None:
    assert tracker(jobs).peak() == max(held_at(jobs, step) for step in range(301))


@given(JOBS, st.integers(0, 500), st.integers(1, 300))
def test_a_candidate_counts_as_if_it_ran(jobs: list[tuple[int, int, int]], prompt: int, output: int) -> None:
    assert tracker(jobs).peak(entry(prompt, output)) == tracker([*jobs, (prompt, output, 0)]).peak()


@given(JOBS)
def test_the_peak_is_never_more_than_the_sum_of_peaks(jobs: list[tuple[int, int, int]]) -> None:
    in_time = [job for job in jobs if job[2] <= job[1]]
    kv_peaks = tracker(in_time)
    assert kv_peaks.peak() <= kv_peaks.own_peaks == sum(prompt + output for prompt, output, _ in in_time)


def test_jobs_that_leave_do_not_count() -> None:
    kv_peaks = KvPeakTracker(1000)
    one, two = entry(100, 50), entry(300, 50)
    kv_peaks.add(one)
    kv_peaks.add(two)
    assert kv_peaks.peak(leaving={two}) == 150
    kv_peaks.remove(two)
    kv_peaks.remove(two)
    assert (kv_peaks.peak(), kv_peaks.own_peaks) == (150, 150)


# In the scheduler.


def nearly_done(kv_packing: KvPacking, kv_tokens: int | None = 1000, foreign: Load | None = None) -> Scheduler:
    """A worker with a job that holds 480 of its 500 tokens."""
    scheduler = a_scheduler(a_view(kv_tokens=kv_tokens, kv_packing=kv_packing, foreign=foreign))
    offer(scheduler, a_job("old", tokens=100, output=400))
    assert sent(scheduler.tick(0.0)) == ["old"]
    first_token(scheduler, "old")
    scheduler.progress("old", Produced(380), 0.0)
    return scheduler


@pytest.mark.parametrize(("kv_packing", "goes"), [("sum", []), ("timed", ["new"])])
def test_a_job_that_grows_while_another_ends_fits_by_timed_packing_only(kv_packing: KvPacking, goes: list[str]) -> None:
    scheduler = nearly_done(kv_packing)
    offer(scheduler, a_job("new", tokens=100, output=500))
    assert sent(scheduler.tick(1.0)) == goes


def test_a_job_that_does_not_fit_in_time_waits() -> None:
    scheduler = nearly_done("timed")
    # 480 + 510 held now, and 20 tokens more each before the old job ends: 1,030 of 1,000.
    offer(scheduler, a_job("new", tokens=510, output=100))
    assert sent(scheduler.tick(1.0)) == []
    end(scheduler, "old", now=2.0)
    assert sent(scheduler.tick(2.0)) == ["new"]


def test_kv_of_other_clients_counts() -> None:
    scheduler = nearly_done("timed", foreign=Load(running=1, kv_tokens=400))
    offer(scheduler, a_job("new", tokens=100, output=500))
    assert sent(scheduler.tick(1.0)) == []
    assert scheduler.predicted_kv_tokens() == {"w": 900}


def test_a_job_past_its_prediction_is_not_taken_to_be_gone() -> None:
    scheduler = nearly_done("timed")
    scheduler.progress("old", Produced(100), 0.0)
    assert scheduler.predicted_kv_tokens() == {"w": 580}
    offer(scheduler, a_job("new", tokens=100, output=410))
    assert sent(scheduler.tick(1.0)) == []


@pytest.mark.parametrize("kv_packing", ["sum", "timed"])
def test_unknown_kv_limits_nothing(kv_packing: KvPacking) -> None:
    scheduler = nearly_done(kv_packing, kv_tokens=None)
    offer(scheduler, *(a_job(f"{n}", tokens=10_000, output=10_000) for n in range(3)))
    assert len(sent(scheduler.tick(1.0))) == 3


@pytest.mark.parametrize("kv_packing", ["sum", "timed"])
def test_a_job_larger_than_the_kv_goes_when_nothing_else_runs(kv_packing: KvPacking) -> None:
    scheduler = nearly_done(kv_packing)
    offer(scheduler, a_job("huge", tokens=2000))
    assert sent(scheduler.tick(1.0)) == []
    end(scheduler, "old", now=2.0)
    assert sent(scheduler.tick(2.0)) == ["huge"]


def test_lanes_leave_their_reserve_of_the_peak() -> None:
    scheduler = a_scheduler(a_view(kv_tokens=1000, kv_packing="timed"), P2=a_policy(reserve=0.25))
    offer(scheduler, a_job("1", lane=Lane.P2, tokens=700, output=40), a_job("2", lane=Lane.P2, tokens=100))
    assert sent(scheduler.tick(0.0)) == ["1"]


def test_the_least_loaded_worker_has_the_least_kv_in_use() -> None:
    views = [a_view(name, kv_tokens=1000, kv_packing="timed") for name in ("a", "b")]
    scheduler = a_scheduler(*views)
    offer(scheduler, a_job("1", tokens=500), a_job("2", tokens=50), a_job("3", tokens=50))
    plans = scheduler.tick(0.0).plans
    assert {plan.worker: [job.job_id for job in plan.jobs] for plan in plans} == {"a": ["1"], "b": ["2", "3"]}


def test_preemption_frees_what_the_peak_needs_and_no_more() -> None:
    scheduler = a_scheduler(
        a_view(kv_tokens=1000, kv_packing="timed"),
        P0=a_policy(may_preempt=(Lane.P2,)),
        P2=a_policy(preemptible=True),
    )
    batch = [a_job(f"batch-{n}", lane=Lane.P2, tokens=200, output=100, resume=ResumeMode.CONTINUE) for n in range(3)]
    offer(scheduler, *batch)
    assert len(sent(scheduler.tick(0.0))) == 3
    offer(scheduler, a_job("live", lane=Lane.P0, tokens=300, output=100))
    tick = scheduler.tick(1.0)
    assert (len(tick.evictions), sent(tick)) == (1, [])
    end(scheduler, tick.evictions[0].job_id, now=1.1)
    assert sent(scheduler.tick(1.1)) == ["live"]


def test_a_nominee_waits_until_the_predicted_peak_has_fallen() -> None:
    scheduler = a_scheduler(
        a_view(kv_tokens=1000, kv_packing="timed"),
        P0=a_policy(may_preempt=(Lane.P2,)),
        P2=a_policy(preemptible=True),
    )
    offer(
        scheduler,
        *(a_job(f"{n}", lane=Lane.P2, tokens=200, output=100, resume=ResumeMode.CONTINUE) for n in range(3)),
    )
    scheduler.tick(0.0)
    offer(scheduler, a_job("live", lane=Lane.P0, tokens=500, output=100))
    first, second = (job.job_id for job in scheduler.tick(1.0).evictions)
    end(scheduler, first, now=1.1)
    assert sent(scheduler.tick(1.1)) == []
    end(scheduler, second, now=1.2)
    assert sent(scheduler.tick(1.2)) == ["live"]


def test_the_packing_of_a_worker_may_change_while_jobs_run() -> None:
    scheduler = a_scheduler(a_view(kv_tokens=1000))
    offer(scheduler, a_job("old", tokens=500, output=400))
    scheduler.tick(0.0)
    scheduler.observe(a_view(kv_tokens=1000, kv_packing="timed"), 1.0)
    offer(scheduler, a_job("new", tokens=100, output=100))
    assert sent(scheduler.tick(1.0)) == []
    end(scheduler, "old", now=2.0)
    assert sent(scheduler.tick(2.0)) == ["new"]
    scheduler.observe(a_view(kv_tokens=1000), 3.0)
    assert scheduler.predicted_kv_tokens() == {"w": 200}
