"""Decides whether a job whose attempt was lost or preempted is retried. Shared by dispatch and simulator.

A job restarts if its client has received nothing. Otherwise it resumes from its token ids, provided the worker that
lost it knows them exactly. A job that resumes keeps the precision that it began with; one that restarts is free of it.
"""

from msgspec import Struct

from inferry.domain.attempts import Attempt
from inferry.domain.errors import Preempted, Prefilled, WorkerUnreachable
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, ResumePoint
from inferry.domain.prefill import computed_whole, handed_over
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.values import replace

MAX_LOSSES = 3
"""Losses after which a job fails, so that a job that crashes its worker cannot crash the whole fleet. Workers that
could not be reached do not count: the job did not start there."""


class Retry(Struct, frozen=True):
    """The job of the next attempt. `from_start`: output received so far is void."""

    job: InferenceJob
    from_start: bool


def next_attempt(attempt: Attempt, end: Failed) -> Retry | Done | None:
    """The next attempt; `Done` if the output limit was already reached; None if the error is final."""
    job, error = attempt.job, end.error
    if isinstance(error, Prefilled):
        return Retry(handed_over(job, error, end.usage), from_start=True)
    was_prefill = job.route.role == "prefill"
    if job.route.role is not None:
        job = computed_whole(job)
    # A prefill is counted by `job.prefill`, however it ended.
    was_preempted = isinstance(error, Preempted) and not was_prefill
    was_unreachable = isinstance(error, WorkerUnreachable) and not was_prefill
    losses = job.attempt - job.preemptions - job.unreachable_attempts - (job.prefill is not None)
    if not error.can_failover or (losses >= MAX_LOSSES and not was_preempted and not was_unreachable):
        return None
    resume_point = end.resume_point if attempt.output_tokens else job.resume_point
    if resume_point is None and job.stream and attempt.output_tokens:
        return None
    if resume_point is not None and attempt.output_tokens:
        cached = end.usage.cached_tokens if job.resume_point is None else job.resume_point.cached_tokens
        resume_point = replace(resume_point, cached_tokens=cached)
    # With stop strings, text may have been held back by the worker.
    is_text_known = resume_point is not None and (not job.payload.sampling.stop or resume_point.unsent == "")
    if resume_point is not None and is_text_known and len(resume_point.output_ids) >= job.token_budget:
        before = len(job.resume_point.output_ids) if job.resume_point is not None else 0
        usage = Usage(len(resume_point.prompt_ids) + before, 0, len(resume_point.output_ids) - before)
        return Done(job.job_id, FinishReason.LENGTH, usage)
    # Another attempt costs again: it does not overflow.
    route = replace(job.route, overflow=False) if job.route.overflow else job.route
    keeps_worker = was_preempted or was_prefill
    if not keeps_worker and attempt.plan is not None and attempt.plan.worker not in route.avoid:
        route = replace(route, avoid=(*route.avoid, attempt.plan.worker))
    if resume_point is not None and route.precision is None and attempt.plan is not None:
        route = replace(route, precision=attempt.plan.precision)
    next_job = replace(
        job,
        attempt=job.attempt + 1,
        preemptions=job.preemptions + was_preempted,
        unreachable_attempts=job.unreachable_attempts + was_unreachable,
        resume_point=resume_point,
        route=route,
        batch_key=replace(job.batch_key, route=route),
        footprint=job.footprint if resume_point is None else _remaining_footprint(job, resume_point),
        max_wait_s=0.0,
        overflow=None,
        # A client that has received output does not get a queue timeout.
        deadline=job.deadline if resume_point is None else None,
    )
    return Retry(next_job, from_start=resume_point is None)


def total_usage(job: InferenceJob, usage: Usage) -> Usage:
    """Usage of the whole job as reported to the client: that of the last attempt plus the output before it and the GPU
    time of a prefill elsewhere.

    A later attempt finds what earlier ones have computed. Only what the first one found cached is reported.
    """
    if job.prefill is not None and job.prefill.gpu_seconds:
        usage = replace(usage, gpu_seconds=(usage.gpu_seconds or 0.0) + job.prefill.gpu_seconds)
    if job.resume_point is None:
        return usage
    before = len(job.resume_point.output_ids)
    prompt = len(job.resume_point.prompt_ids)
    return Usage(prompt, min(job.resume_point.cached_tokens, prompt), usage.output_tokens + before, usage.gpu_seconds)


def _remaining_footprint(job: InferenceJob, resume_point: ResumePoint) -> Footprint:
    written = len(resume_point.output_ids)
    output = job.footprint.output
    return Footprint(
        Estimate.exactly(len(resume_point.prompt_ids) + written),
        Estimate.exactly(0),
        Estimate(*(max(1, tokens - written) for tokens in (output.low, output.expected, output.high))),
    )
