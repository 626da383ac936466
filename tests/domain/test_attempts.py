"""Successive attempts of one job: their limits, their usage and the workers they avoid."""

import pytest

from inferry.domain.attempts import RENEW_AHEAD_TOKENS, UNLIMITED, Attempt
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InvalidRequest,
    Preempted,
    QueueTimeout,
    RunCancelled,
    WorkerLost,
)
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, ResumeMode, ResumePoint
from inferry.domain.lanes import ReleaseReason
from inferry.domain.ledger import Outcome
from inferry.domain.plans import BatchPlan
from inferry.domain.recovery import MAX_LOSSES, Retry, next_attempt, total_usage
from inferry.domain.streams import Done, Failed, FinishReason, Placed, Usage
from inferry.domain.values import replace
from support.builders import a_job

PROMPT = (5, 6, 7)


def a_stream(*, budget: int = 100, **fields: object) -> InferenceJob:
    job = a_job(tokens=3, output=budget, stream=True, resume=ResumeMode.CONTINUE, **fields)  # type: ignore[arg-type]
    return replace(job, token_budget=budget)


def after(job: InferenceJob, written: int) -> InferenceJob:
    """The job as it goes on after so many tokens."""
    return replace(job, attempt=2, resume_point=ResumePoint(PROMPT, tuple(range(written))))


def sent(job: InferenceJob, worker: str = "w", written: int = 0) -> Attempt:
    attempt = Attempt(job)
    attempt.sent(BatchPlan(plan_id=1, worker=worker, jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0), 0.0)
    if written:
        attempt.first_token(0.1)
        attempt.output_tokens = written
    return attempt


def test_a_grant_covers_the_job_and_each_attempt_gets_the_rest() -> None:
    first = Attempt(a_stream())
    first.grant(40)
    assert (first.granted_tokens, first.granted) == (40, 40)
    second = Attempt(after(first.job, 15))
    second.grant(first.granted)
    assert (second.granted_tokens, second.granted) == (25, 40)
    third = Attempt(after(first.job, 30))
    third.grant(second.granted)
    assert (third.granted_tokens, third.granted) == (10, 40)


def test_an_unlimited_job_is_unlimited_in_every_attempt() -> None:
    attempt = Attempt(after(a_stream(), 15))
    attempt.grant(UNLIMITED)
    assert (attempt.granted_tokens, attempt.granted, attempt.renew_at_tokens) == (UNLIMITED, UNLIMITED, UNLIMITED)


def test_a_lease_is_renewed_ahead_of_need_unless_the_job_ends_at_its_own_limit() -> None:
    attempt = Attempt(a_stream(budget=100))
    attempt.grant(99)
    assert attempt.renew_at_tokens == 99 - RENEW_AHEAD_TOKENS
    attempt.grant(100)
    assert attempt.renew_at_tokens == 101


def test_the_limit_of_several_choices_is_that_of_all_of_them() -> None:
    job = a_stream(budget=100)
    attempt = Attempt(replace(job, payload=replace(job.payload, choices=3)))
    attempt.grant(299)
    assert attempt.renew_at_tokens == 299 - RENEW_AHEAD_TOKENS
    attempt.grant(300)
    assert attempt.renew_at_tokens == 301


def test_a_lost_attempt_is_charged_the_larger_of_delivered_and_reported_output() -> None:
    for reported, counted in ((0, 4), (3, 4), (6, 6)):
        attempt = sent(a_stream(), written=4)
        attempt.ended(Failed(attempt.job.job_id, WorkerLost("gone"), Usage(0, 0, reported)), 1.0)
        assert attempt.usage() == Usage(3, 0, counted)


def test_an_attempt_lost_before_its_first_token_used_nothing() -> None:
    attempt = sent(a_stream())
    attempt.ended(Failed(attempt.job.job_id, WorkerLost("gone")), 1.0)
    assert attempt.usage() == Usage()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ClientClosed("x"), Outcome.CANCELLED),
        (RunCancelled("x"), Outcome.CANCELLED),
        (QueueTimeout("x"), Outcome.EXPIRED),
        (Preempted("x"), Outcome.PREEMPTED),
        (WorkerLost("x"), Outcome.FAILED),
    ],
)
def test_a_second_attempt_reports_its_outcome_like_a_first(error: GatewayError, outcome: Outcome) -> None:
    attempt = sent(after(a_stream(), 2), written=1)
    attempt.ended(Failed(attempt.job.job_id, error), 1.0)
    entry = attempt.entry(5.0)
    assert (entry.outcome, entry.attempt, entry.output_tokens) == (outcome, 2, 1)


# -- what comes next -------------------------------------------------------------------------------------------------


def lost_on(job: InferenceJob, worker: str, written: int = 0, error: GatewayError | None = None) -> InferenceJob:
    before = () if job.resume_point is None else job.resume_point.output_ids
    resume_point = ResumePoint(PROMPT, (*before, *range(written))) if written else None
    then = next_attempt(
        sent(job, worker, written), Failed(job.job_id, error or WorkerLost("x"), resume_point=resume_point)
    )
    assert isinstance(then, Retry)
    return then.job


def test_workers_that_lost_a_job_are_avoided_and_workers_that_preempted_it_are_not() -> None:
    job = lost_on(a_stream(), "w1", 1)
    job = lost_on(job, "w2", 1, Preempted("for another"))
    job = lost_on(job, "w3", 1)
    assert job.route.avoid == job.batch_key.route.avoid == ("w1", "w3")
    assert (job.attempt, job.preemptions) == (4, 1)


def test_preemptions_are_unlimited_and_lost_attempts_are_limited() -> None:
    job = a_stream()
    for _ in range(2 * MAX_LOSSES):
        job = lost_on(job, "w", 1, Preempted("for another"))
    for number in range(MAX_LOSSES - 1):
        job = lost_on(job, f"w{number}", 1)
    assert (
        next_attempt(sent(job, "last", 1), Failed(job.job_id, WorkerLost("x"), resume_point=job.resume_point)) is None
    )


def test_a_job_lost_again_before_another_token_resumes_from_the_same_point() -> None:
    job = lost_on(a_stream(), "w1", 3)
    again = lost_on(job, "w2")
    assert again.resume_point == job.resume_point == ResumePoint(PROMPT, (0, 1, 2))


def test_a_retried_job_expects_at_least_one_more_token() -> None:
    job = a_stream(budget=100)
    few = replace(job, footprint=Footprint(job.footprint.prompt, job.footprint.cached, Estimate(1, 4, 9)))
    again = lost_on(few, "w", 6)
    assert again.footprint.prompt == Estimate.exactly(9)
    assert again.footprint.output == Estimate(1, 1, 3)


def test_cached_tokens_never_exceed_the_clients_prompt() -> None:
    for found, reported in ((7, 3), (2, 2)):
        job = replace(a_stream(), attempt=2, resume_point=ResumePoint(PROMPT, tuple(range(4)), cached_tokens=found))
        assert total_usage(job, Usage(7, 7, 2, 0.5)) == Usage(3, reported, 6, 0.5)


@pytest.mark.parametrize(("error", "attained"), [(InvalidRequest("x"), None), (WorkerLost("x"), True)])
def test_a_call_that_its_engine_refuses_as_invalid_counts_neither_as_attained_nor_as_missed(
    error: GatewayError, attained: bool | None
) -> None:
    attempt = sent(a_stream())
    attempt.slo_attained = True
    attempt.ended(Failed(attempt.job.job_id, error), 1.0)
    assert attempt.entry(0.0).attained is attained


@pytest.mark.parametrize(("shared_with", "charged"), [("another", 0), ("itself", 7), (None, 7)])
def test_an_attempt_that_shares_the_execution_of_another_job_has_used_nothing(
    shared_with: str | None, charged: int
) -> None:
    attempt = sent(a_job(job_id="itself"))
    attempt.placed = Placed("itself", "w", 0.0, 1, shared_with=shared_with)
    attempt.ended_at, attempt.end = 1.0, Done("itself", FinishReason.STOP, Usage(5, 0, 7, 0.1))
    assert attempt.usage().output_tokens == charged
    assert attempt.shared_with == ("another" if charged == 0 else None)
