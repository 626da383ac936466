"""What becomes of a job whose attempt was lost, or stopped for somebody else: the same job again, or nothing more.

Decided once for dispatch and simulation. A job starts again while its reader has seen nothing of it; after that it goes
on from the token ids it has, where the worker that lost it knows them exactly.
"""

from msgspec import Struct

from inferry.domain.attempts import Attempt
from inferry.domain.errors import Preempted, WorkerUnreachable
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, SoFar
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.values import replace

MAX_LOSSES = 3
"""Workers that a job may be lost on. A job that brings down whoever takes it must not visit the whole fleet. A worker
that could not be reached does not count: the job never began there."""


class Again(Struct, frozen=True):
    """The job as it is to be offered again. `from_start` says that what its reader may hold of it is void."""

    job: InferenceJob
    from_start: bool


def next_attempt(attempt: Attempt, end: Failed) -> Again | Done | None:
    """The job's next attempt; its end, where all it may write had been written; None where the error stands."""
    job, error = attempt.job, end.error
    was_stopped, never_began = isinstance(error, Preempted), isinstance(error, WorkerUnreachable)
    losses = job.attempt - job.preemptions - job.unreached
    if not error.elsewhere or (losses >= MAX_LOSSES and not was_stopped and not never_began):
        return None
    so_far = end.so_far if attempt.output_tokens else job.so_far
    if so_far is None and job.stream and attempt.output_tokens:
        return None
    # Where stop strings are looked for, text may have been held back: a worker is to say what it was.
    is_told = so_far is not None and (not job.payload.sampling.stop or so_far.unsent == "")
    if so_far is not None and is_told and len(so_far.output_ids) >= job.token_budget:
        before = len(job.so_far.output_ids) if job.so_far is not None else 0
        usage = Usage(len(so_far.prompt_ids) + before, 0, len(so_far.output_ids) - before)
        return Done(job.job_id, FinishReason.LENGTH, usage)
    route = job.route
    if not was_stopped and attempt.plan is not None and attempt.plan.worker not in route.avoid:
        route = replace(route, avoid=(*route.avoid, attempt.plan.worker))
    again = replace(
        job,
        attempt=job.attempt + 1,
        preemptions=job.preemptions + was_stopped,
        unreached=job.unreached + never_began,
        so_far=so_far,
        route=route,
        batch_key=replace(job.batch_key, route=route),
        footprint=job.footprint if so_far is None else _what_is_left(job, so_far),
        max_wait_s=0.0,
        # Who reads it already is not told that it came too late.
        deadline=job.deadline if so_far is None else None,
    )
    return Again(again, from_start=so_far is None)


def whole_usage(job: InferenceJob, usage: Usage) -> Usage:
    """What the client is to hear of a job's use: the last attempt's, with what went before it where it belongs."""
    if job.so_far is None:
        return usage
    before = len(job.so_far.output_ids)
    prompt = len(job.so_far.prompt_ids)
    return Usage(prompt, min(usage.cached_tokens, prompt), usage.output_tokens + before, usage.gpu_seconds)


def _what_is_left(job: InferenceJob, so_far: SoFar) -> Footprint:
    written = len(so_far.output_ids)
    output = job.footprint.output
    return Footprint(
        Estimate.exactly(len(so_far.prompt_ids) + written),
        Estimate.exactly(0),
        Estimate(*(max(1, tokens - written) for tokens in (output.low, output.expected, output.high))),
    )
