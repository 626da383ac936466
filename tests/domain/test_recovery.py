"""What becomes of a job whose attempt was lost or stopped."""

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
from inferry.domain.jobs import InferenceJob, Resume, SoFar
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.recovery import MAX_LOSSES, Again, next_attempt, whole_usage
from inferry.domain.streams import Done, Failed, Usage
from inferry.domain.values import replace
from support.builders import a_job

PROMPT = (5, 6, 7)


def lost(
    job: InferenceJob, written: int, error: GatewayError | None = None, so_far: SoFar | None = None
) -> Again | Done | None:
    attempt = Attempt(job)
    plan = BatchPlan(plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
    attempt.sent(plan, 0.0)
    if written:
        attempt.first_token(0.1)
    attempt.output_tokens = written
    return next_attempt(attempt, Failed(job.job_id, error or WorkerLost("gone"), so_far=so_far))


def a_stream(**fields: object) -> InferenceJob:
    return a_job(tokens=3, output=10, stream=True, resume=Resume.CONTINUE, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [WorkerLost("x"), WorkerTimeout("x"), NoWorker("x"), Preempted("x")])
def test_what_says_nothing_against_the_job_leads_on(error: GatewayError) -> None:
    again = lost(a_stream(), 0, error)
    assert isinstance(again, Again)
    assert again.from_start
    assert again.job.attempt == 2
    assert again.job.so_far is None


@pytest.mark.parametrize("error", [ClientClosed("x"), InvalidRequest("x")])
def test_what_is_the_jobs_own_does_not(error: GatewayError) -> None:
    assert lost(a_stream(), 0, error) is None


def test_it_goes_on_from_what_was_delivered() -> None:
    again = lost(a_stream(), 4, so_far=SoFar(PROMPT, (1, 2, 3, 4)))
    assert isinstance(again, Again)
    assert not again.from_start
    assert again.job.so_far == SoFar(PROMPT, (1, 2, 3, 4))
    assert again.job.footprint.prompt.expected == 7
    assert again.job.footprint.output.expected == 6
    assert again.job.route.avoid == ("w",)
    assert again.job.batch_key.route == again.job.route
    assert again.job.max_wait_s == 0.0


def test_what_is_not_known_exactly_cannot_go_on_once_it_was_seen() -> None:
    assert lost(a_stream(), 4) is None
    whole = lost(replace(a_stream(), stream=False), 4)
    assert isinstance(whole, Again)
    assert whole.from_start


def test_an_attempt_that_wrote_nothing_goes_on_from_where_the_one_before_it_stopped() -> None:
    so_far = SoFar(PROMPT, (1, 2))
    again = lost(replace(a_stream(), attempt=2, so_far=so_far), 0)
    assert isinstance(again, Again)
    assert again.job.so_far == so_far


def test_losses_are_limited_and_being_stopped_is_none() -> None:
    job = a_stream()
    for losses in range(1, MAX_LOSSES):
        again = lost(job, 0)
        assert isinstance(again, Again)
        job = again.job
        assert job.attempt == losses + 1
    assert lost(job, 0) is None
    stopped = lost(job, 0, Preempted("for another"))
    assert isinstance(stopped, Again)
    assert stopped.job.preemptions == 1
    assert stopped.job.route == job.route  # nobody is to blame


def test_a_deadline_counts_until_somebody_reads() -> None:
    late = a_stream(deadline=9.0)
    restarted, continued = lost(late, 0), lost(late, 1, so_far=SoFar(PROMPT, (1,)))
    assert isinstance(restarted, Again)
    assert isinstance(continued, Again)
    assert (restarted.job.deadline, continued.job.deadline) == (9.0, None)


def test_a_job_that_had_written_all_it_may_is_done_and_its_usage_is_that_of_the_whole() -> None:
    first = a_stream()
    budget = first.token_budget
    end = lost(first, budget, so_far=SoFar(PROMPT, tuple(range(budget))))
    assert isinstance(end, Done)
    assert whole_usage(first, end.usage) == Usage(3, 0, budget)
    second = replace(first, attempt=2, so_far=SoFar(PROMPT, (0, 1)))
    end = lost(second, budget - 2, so_far=SoFar(PROMPT, tuple(range(budget))))
    assert isinstance(end, Done)
    assert end.usage.output_tokens == budget - 2
    assert whole_usage(second, end.usage) == Usage(3, 0, budget)
