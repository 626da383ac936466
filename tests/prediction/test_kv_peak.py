"""The predicted KV peak against looking at every moment."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.prediction.kv_peak import KvPeak, KvPeakTracker, RunningJob, fits, predicted_peak

JOBS = st.lists(
    st.builds(RunningJob, st.integers(0, 5000), st.integers(0, 3000), st.sampled_from([0.0, 1.0, 20.0, 50.0, 64.0])),
    max_size=12,
)


def held_at(jobs: list[RunningJob], t: float) -> float:
    """Every job counts up to and including the moment of its end."""
    return sum(
        job.held_tokens + job.tokens_per_s * t for job in jobs if t <= job.ends_in_s and job.ends_in_s < inf
    ) + sum(job.held_tokens for job in jobs if job.ends_in_s == inf)


def brute_force(jobs: list[RunningJob], horizon: float = inf) -> float:
    ends = [job.ends_in_s for job in jobs if job.ends_in_s <= horizon and job.ends_in_s < inf]
    moments = [0.0, *ends, *([horizon] if horizon < inf else [])]
    steps = [t * part / 7 for t in ends for part in range(7)]
    return max(held_at(jobs, t) for t in [*moments, *steps])


@given(JOBS)
def test_the_peak_is_the_most_that_is_held_at_any_moment(jobs: list[RunningJob]) -> None:
    peak = predicted_peak(jobs)
    assert peak.tokens == pytest.approx(brute_force(jobs))
    assert held_at(jobs, peak.in_s) == pytest.approx(peak.tokens)


@given(JOBS, st.floats(0, 100))
def test_the_peak_within_a_horizon_looks_no_further(jobs: list[RunningJob], horizon: float) -> None:
    assert predicted_peak(jobs, horizon_s=horizon).tokens == pytest.approx(brute_force(jobs, horizon))


@given(JOBS, JOBS, st.floats(0, 50), st.data())
def test_the_book_agrees_with_the_peak_computed_afresh(
    jobs: list[RunningJob], more: list[RunningJob], now: float, data: st.DataObject
) -> None:
    book = KvPeakTracker()
    for number, job in enumerate(jobs):
        book.put(f"gone-{number}", job, now / 2)
        book.put(f"job-{number}", RunningJob(1, 1, 1), 0.0)
        book.put(f"job-{number}", job, now)
    for number in data.draw(st.permutations(range(len(jobs)))):
        book.drop(f"gone-{number}")
    assert len(book) == len(jobs)
    assert book.peak(now, *more).tokens == pytest.approx(predicted_peak([*jobs, *more]).tokens)


@given(JOBS)
def test_the_peak_never_exceeds_the_sum_of_single_peaks(jobs: list[RunningJob]) -> None:
    most = sum(job.held_tokens + (job.remaining_tokens if job.tokens_per_s else 0) for job in jobs)
    assert sum(job.held_tokens for job in jobs) <= predicted_peak(jobs).tokens <= most + 1e-6


def test_jobs_that_are_nearly_done_free_kv_for_those_that_begin() -> None:
    ending, beginning = RunningJob(4000, 10, 50), RunningJob(100, 3900, 50)
    assert predicted_peak([ending, beginning]) == KvPeak(4120, 0.2)


def test_a_job_is_admitted_if_the_peak_with_it_fits() -> None:
    book = KvPeakTracker()
    book.put("running", RunningJob(4000, 10, 50), 0.0)
    assert fits(book.peak(0.0, RunningJob(100, 3900, 50)), 4200)
    assert not fits(book.peak(0.0, RunningJob(500, 3900, 50)), 4200)
    assert fits(KvPeak(10**12, 0.0), None)


def test_a_job_past_its_predicted_end_is_not_taken_to_be_gone() -> None:
    book = KvPeakTracker()
    book.put("late", RunningJob(1000, 100, 50), 0.0)
    assert book.peak(10.0, RunningJob(10, 90, 10)).tokens == pytest.approx(1200)
    book.drop("late")
    book.drop("late")
    assert book.peak(10.0) == KvPeak(0, 0.0)
