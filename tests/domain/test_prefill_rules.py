"""What becomes of a job whose prompt is computed apart, and what it is billed."""

import pytest

from inferry.dispatch.hedging import may_hedge
from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError, NoWorker, Preempted, Prefilled, WorkerLost, WorkerUnreachable
from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.lanes import ReleaseReason
from inferry.domain.ledger import GpuTimeKind, Outcome
from inferry.domain.plans import BatchPlan
from inferry.domain.prefill import billed_end, engine_usage, for_prefill
from inferry.domain.recovery import MAX_LOSSES, Retry, next_attempt, total_usage
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.ledger.gpu_time import waste_of
from support.builders import a_job


def ended(job: InferenceJob, error: GatewayError, usage: Usage | None = None, written: int = 0) -> Attempt:
    attempt = Attempt(job)
    plan = BatchPlan(plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
    attempt.sent(plan, 0.0)
    if written:
        attempt.first_token(0.1)
    attempt.output_tokens = written
    attempt.ended(Failed(job.job_id, error, usage or Usage()), 0.2)
    return attempt


def after(job: InferenceJob, error: GatewayError, usage: Usage | None = None) -> InferenceJob:
    attempt = ended(job, error, usage)
    assert isinstance(attempt.end, Failed)
    retry = next_attempt(attempt, attempt.end)
    assert isinstance(retry, Retry)
    assert retry.from_start
    assert retry.job.batch_key.route == retry.job.route
    return retry.job


def handed_over(job: InferenceJob) -> InferenceJob:
    ready = Prefilled("ready")
    ready.kv_transfer = b'{"remote_host":"x"}'
    return after(for_prefill(job), ready, Usage(2100, 512, 0))


def test_a_prefill_is_the_job_with_one_output_token() -> None:
    job = a_job(tokens=2000, cached=100, output=30)
    prefill = for_prefill(job)
    assert (prefill.route.role, prefill.attempt) == ("prefill", 1)
    assert prefill.footprint.prompt == job.footprint.prompt
    assert (prefill.footprint.prefill_tokens, prefill.footprint.output.high) == (1900, 1)


def test_after_a_prefill_only_the_output_is_left() -> None:
    job = a_job(tokens=2000, cached=100, output=30)
    decode = handed_over(job)
    assert (decode.route.role, decode.attempt, decode.route.avoid) == ("decode", 2, ())
    assert (decode.footprint.prompt.expected, decode.footprint.prefill_tokens) == (2100, 1)
    assert decode.footprint.output == job.footprint.output
    assert decode.prefill is not None
    assert (decode.prefill.kv_transfer, decode.prefill.cached_tokens) == (b'{"remote_host":"x"}', 512)


@pytest.mark.parametrize("error", [WorkerLost("x"), NoWorker("x"), WorkerUnreachable("x"), Preempted("x")])
def test_after_a_failed_prefill_the_job_is_as_it_came(error: GatewayError) -> None:
    job = a_job(tokens=2000, output=30)
    whole = after(for_prefill(job), error)
    assert (whole.route, whole.footprint, whole.attempt) == (job.route, job.footprint, 2)
    assert (whole.preemptions, whole.unreachable_attempts) == (0, 0)


def test_kv_is_fetched_once() -> None:
    job = a_job(tokens=2000, output=30)
    again = after(handed_over(job), WorkerLost("x"))
    assert (again.route.role, again.route.avoid, again.footprint) == (None, ("w",), job.footprint)
    assert again.prefill is not None
    assert (again.prefill.is_handed_over, again.prefill.kv_transfer, again.prefill.gpu_seconds) == (False, None, 0.0)


@pytest.mark.parametrize("prefill_error", [Prefilled("x"), WorkerLost("x"), Preempted("x"), WorkerUnreachable("x")])
def test_a_prefill_is_none_of_the_losses_that_fail_a_job(prefill_error: GatewayError) -> None:
    job = after(for_prefill(a_job(tokens=2000)), prefill_error)
    for _ in range(MAX_LOSSES - 1):
        job = after(job, WorkerLost("x"))
    last = ended(job, WorkerLost("x"))
    assert isinstance(last.end, Failed)
    assert next_attempt(last, last.end) is None


def test_a_handed_over_stream_that_has_begun_resumes_from_its_tokens() -> None:
    job = replace(handed_over(a_job(tokens=3, output=10, stream=True)), token_budget=10)
    attempt = ended(job, WorkerLost("x"), written=2)
    retry = next_attempt(attempt, Failed(job.job_id, WorkerLost("x"), resume_point=ResumePoint((1, 2, 3), (4, 5))))
    assert isinstance(retry, Retry)
    assert not retry.from_start
    assert retry.job.route.role is None
    assert retry.job.footprint.prompt.expected == 5


def test_the_first_try_of_either_step_may_be_hedged() -> None:
    prefill = for_prefill(a_job(tokens=2000))
    assert may_hedge(Attempt(prefill))
    decode = after(prefill, Prefilled("x"))
    assert may_hedge(Attempt(decode))
    assert not may_hedge(Attempt(after(decode, WorkerLost("x"))))


def test_a_handed_over_call_is_billed_what_the_prefill_had_cached() -> None:
    job = handed_over(a_job(tokens=2000))
    assert job.prefill is not None
    job = replace(job, prefill=replace(job.prefill, gpu_seconds=0.5))
    for reported in (0, 512, 2099):
        end = Done(job.job_id, FinishReason.STOP, Usage(2100, reported, 7))
        assert billed_end(job, end).usage == Usage(2100, 512, 7)
        assert engine_usage(job, end.usage) == Usage(2100, 2099, 7)
    assert total_usage(job, Usage(2100, 512, 7, 0.25)).gpu_seconds == 0.75
    assert total_usage(job, Usage(2100, 512, 7)).gpu_seconds == 0.5


def test_other_calls_are_billed_as_reported() -> None:
    whole = after(for_prefill(a_job(tokens=2000)), WorkerLost("x"))
    for job in (a_job(), whole):
        end = Done(job.job_id, FinishReason.STOP, Usage(2100, 9, 7))
        assert billed_end(job, end) is end
        assert engine_usage(job, end.usage) is end.usage
        assert total_usage(job, Usage(2100, 9, 7, 0.25)).gpu_seconds == 0.25


def test_the_gpu_time_of_a_prefill_is_work_unless_it_was_for_nothing() -> None:
    job = for_prefill(a_job(tokens=2000))
    ready, lost = ended(job, Prefilled("x"), Usage(2000)), ended(job, WorkerLost("x"))
    ready.gpu_seconds = lost.gpu_seconds = 0.5
    row = ready.entry(0.0)
    assert (row.outcome, row.error_code, row.prompt_tokens, row.gpu_seconds) == (Outcome.PREFILLED, None, 0, 0.5)
    assert waste_of(ready, row.outcome) == (GpuTimeKind.WORK, 0.0)
    assert waste_of(lost, lost.entry(0.0).outcome) == (GpuTimeKind.RECOMPUTED, 0.5)
