"""Retry, resume or failure of a job whose attempt was lost or stopped."""

import pytest

from inferry.domain.attempts import Attempt
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InvalidRequest,
    NoWorker,
    Preempted,
    WorkerLost,
    WorkerTimeout,
)
from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.recovery import MAX_LOSSES, Retry, next_attempt, total_usage
from inferry.domain.streams import Done, Failed, Usage
from inferry.domain.values import replace
from support.builders import a_job

PROMPT = (5, 6, 7)


def lost(
    job: InferenceJob,
    written: int,
    error: GatewayError | None = None,
    resume_point: ResumePoint | None = None,
    precision: str | None = None,
) -> Retry | Done | None:
    attempt = Attempt(job)
    plan = BatchPlan(
        plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0, precision=precision
    )
    attempt.sent(plan, 0.0)
    if written:
        attempt.first_token(0.1)
    attempt.output_tokens = written
    return next_attempt(attempt, Failed(job.job_id, error or WorkerLost("gone"), resume_point=resume_point))


def a_stream(**fields: object) -> InferenceJob:
    return a_job(tokens=3, output=10, stream=True, resume=ResumeMode.CONTINUE, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [WorkerLost("x"), WorkerTimeout("x"), NoWorker("x"), Preempted("x")])
def test_errors_of_the_worker_are_retried(error: GatewayError) -> None:
    again = lost(a_stream(), 0, error)
    assert isinstance(again, Retry)
    assert again.from_start
    assert again.job.attempt == 2
    assert again.job.resume_point is None


@pytest.mark.parametrize("error", [ClientClosed("x"), InvalidRequest("x")])
def test_errors_of_the_job_are_not_retried(error: GatewayError) -> None:
    assert lost(a_stream(), 0, error) is None


def test_a_job_resumes_after_the_last_delivered_token() -> None:
    again = lost(a_stream(), 4, resume_point=ResumePoint(PROMPT, (1, 2, 3, 4)))
    assert isinstance(again, Retry)
    assert not again.from_start
    assert again.job.resume_point == ResumePoint(PROMPT, (1, 2, 3, 4))
    assert again.job.footprint.prompt.expected == 7
    assert again.job.footprint.output.expected == 6
    assert again.job.route.avoid == ("w",)
    assert again.job.batch_key.route == again.job.route
    assert again.job.max_wait_s == 0.0


@pytest.mark.parametrize("error", [WorkerLost("x"), Preempted("x")])
def test_a_job_that_resumes_keeps_the_precision_it_began_with(error: GatewayError) -> None:
    point = ResumePoint(PROMPT, (1, 2))
    again = lost(a_stream(), 2, error, point, precision="bf16")
    assert isinstance(again, Retry)
    assert again.job.route.precision == "bf16"
    assert again.job.batch_key.route == again.job.route
    # A later attempt without output changes nothing.
    third = lost(again.job, 0, error, precision="bf16")
    assert isinstance(third, Retry)
    assert third.job.route.precision == "bf16"


@pytest.mark.parametrize("error", [WorkerLost("x"), Preempted("x")])
def test_a_job_that_restarts_may_get_another_precision(error: GatewayError) -> None:
    again = lost(a_stream(), 0, error, precision="bf16")
    assert isinstance(again, Retry)
    assert again.job.route.precision is None


def test_a_job_without_exact_tokens_cannot_resume_after_delivery() -> None:
    assert lost(a_stream(), 4) is None
    whole = lost(replace(a_stream(), stream=False), 4)
    assert isinstance(whole, Retry)
    assert whole.from_start


def test_an_attempt_without_output_keeps_the_previous_resume_point() -> None:
    resume_point = ResumePoint(PROMPT, (1, 2))
    again = lost(replace(a_stream(), attempt=2, resume_point=resume_point), 0)
    assert isinstance(again, Retry)
    assert again.job.resume_point == resume_point


def test_lost_attempts_are_limited_and_preemptions_are_not_counted() -> None:
    job = a_stream()
    for losses in range(1, MAX_LOSSES):
        again = lost(job, 0)
        assert isinstance(again, Retry)
        job = again.job
        assert job.attempt == losses + 1
    assert lost(job, 0) is None
    stopped = lost(job, 0, Preempted("for another"))
    assert isinstance(stopped, Retry)
    assert stopped.job.preemptions == 1
    assert stopped.job.route == job.route  # nobody is to blame


def test_a_deadline_applies_until_the_first_delivered_token() -> None:
    late = a_stream(deadline=9.0)
    restarted, continued = lost(late, 0), lost(late, 1, resume_point=ResumePoint(PROMPT, (1,)))
    assert isinstance(restarted, Retry)
    assert isinstance(continued, Retry)
    assert (restarted.job.deadline, continued.job.deadline) == (9.0, None)


def test_a_lost_job_that_had_reached_its_limit_is_done_with_its_total_usage() -> None:
    first = a_stream()
    budget = first.token_budget
    end = lost(first, budget, resume_point=ResumePoint(PROMPT, tuple(range(budget))))
    assert isinstance(end, Done)
    assert total_usage(first, end.usage) == Usage(3, 0, budget)
    second = replace(first, attempt=2, resume_point=ResumePoint(PROMPT, (0, 1)))
    end = lost(second, budget - 2, resume_point=ResumePoint(PROMPT, tuple(range(budget))))
    assert isinstance(end, Done)
    assert end.usage.output_tokens == budget - 2
    assert total_usage(second, end.usage) == Usage(3, 0, budget)


def test_only_what_the_first_attempt_found_cached_is_reported_as_cached() -> None:
    job = a_stream()
    for attempt, found in ((1, 2), (2, 3)):
        attempted = Attempt(job)
        plan = BatchPlan(plan_id=attempt, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
        attempted.sent(plan, 0.0)
        attempted.first_token(0.1)
        attempted.output_tokens = 1
        point = ResumePoint(PROMPT, tuple(range(attempt)))
        retry = next_attempt(attempted, Failed(job.job_id, Preempted("x"), Usage(3, found, 1), point))
        assert isinstance(retry, Retry)
        job = retry.job
    assert total_usage(job, Usage(5, 5, 4)) == Usage(3, 2, 6)
