"""GPU time of a worker by kind: every interval adds up to wall time times GPUs, and waste is moved out of work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.attempts import Attempt
from inferry.domain.jobs import ResumePoint
from inferry.domain.ledger import GpuTimeKind, Outcome
from inferry.domain.values import replace
from inferry.ledger.gpu_time import GpuTimeBook, waste_of
from support.builders import a_job

WASTE = [GpuTimeKind.CANCELLED, GpuTimeKind.PREEMPTED, GpuTimeKind.RECOMPUTED, GpuTimeKind.UNATTRIBUTED]


def test_busy_time_is_work_and_the_rest_is_idle() -> None:
    book = GpuTimeBook(gpus=4)
    book.close_interval(10.0, 2.5)
    assert book.totals[GpuTimeKind.WORK] == 10.0
    assert book.totals[GpuTimeKind.IDLE] == 30.0
    assert book.utilisation == 0.25


def test_waste_that_is_larger_than_the_work_of_an_interval_is_moved_later() -> None:
    book = GpuTimeBook(gpus=1)
    book.close_interval(10.0, 10.0)  # a job that runs until the next interval
    book.move(GpuTimeKind.CANCELLED, 12.0)
    book.close_interval(10.0, 2.0)
    assert (book.totals[GpuTimeKind.CANCELLED], book.totals[GpuTimeKind.WORK]) == (2.0, 10.0)
    book.close_interval(10.0, 10.0)
    book.close_interval(10.0, 10.0)
    assert (book.totals[GpuTimeKind.CANCELLED], book.totals[GpuTimeKind.WORK]) == (12.0, 20.0)


def test_a_row_has_what_was_added_since_the_last_one() -> None:
    book = GpuTimeBook(gpus=1)
    book.close_interval(5.0, 5.0)
    assert book.take_row()[GpuTimeKind.WORK] == 5.0
    book.close_interval(5.0, 0.0)
    assert book.take_row() == {**dict.fromkeys(GpuTimeKind, 0.0), GpuTimeKind.IDLE: 5.0}


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0, 100), st.floats(-1, 200), st.sampled_from(WASTE), st.floats(0, 1000)), max_size=30),
)
def test_every_interval_adds_up_and_no_kind_falls(
    gpus: int, intervals: list[tuple[float, float, GpuTimeKind, float]]
) -> None:
    book = GpuTimeBook(gpus)
    for wall_s, busy_s, kind, moved in intervals:
        before = dict(book.totals)
        book.move(kind, moved)
        book.close_interval(wall_s, busy_s)
        assert all(book.totals[one] >= before[one] for one in GpuTimeKind)
        assert sum(book.take_row().values()) == pytest.approx(wall_s * gpus)


def an_attempt(*, resumed: bool | None = None, resumes: bool = False) -> Attempt:
    job = a_job()
    attempt = Attempt(replace(job, resume_point=ResumePoint((1,), (2,))) if resumes else job)
    attempt.gpu_seconds, attempt.gpu_prefill_seconds, attempt.resumed = 3.0, 1.0, resumed
    return attempt


@pytest.mark.parametrize(
    ("attempt", "outcome", "waste"),
    [
        (an_attempt(), Outcome.DONE, (GpuTimeKind.WORK, 0.0)),
        (an_attempt(resumes=True), Outcome.DONE, (GpuTimeKind.RECOMPUTED, 1.0)),
        (an_attempt(), Outcome.CANCELLED, (GpuTimeKind.CANCELLED, 3.0)),
        (an_attempt(), Outcome.EXPIRED, (GpuTimeKind.CANCELLED, 3.0)),
        (an_attempt(resumed=False), Outcome.PREEMPTED, (GpuTimeKind.PREEMPTED, 3.0)),
        (an_attempt(resumed=True), Outcome.PREEMPTED, (GpuTimeKind.WORK, 0.0)),
        (an_attempt(resumed=True, resumes=True), Outcome.PREEMPTED, (GpuTimeKind.RECOMPUTED, 1.0)),
        (an_attempt(), Outcome.FAILED, (GpuTimeKind.RECOMPUTED, 3.0)),
        (an_attempt(resumed=False), Outcome.FAILED, (GpuTimeKind.RECOMPUTED, 3.0)),
        (an_attempt(resumed=True), Outcome.FAILED, (GpuTimeKind.WORK, 0.0)),
    ],
)
def test_the_waste_of_an_attempt(attempt: Attempt, outcome: Outcome, waste: tuple[GpuTimeKind, float]) -> None:
    assert waste_of(attempt, outcome) == waste
