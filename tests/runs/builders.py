"""Calls of runs for tests."""

import itertools

from inferry.domain.attempts import Attempt
from inferry.domain.errors import (
    GatewayError,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.runs.registry import Run, RunRegistry
from support.builders import a_job

_numbers = itertools.count()


def a_call(run: str | None, parent: str | None = None, *, tenant: str = "a", step: str | None = None) -> InferenceJob:
    job_id = f"call-{next(_numbers)}"
    job = a_job(job_id, tenant=tenant, run_id=job_id if run is None else run, step_id=step)
    return replace(job, parent_run=parent)


def ended(job: InferenceJob, *, sent_at: float | None = None, error: GatewayError | None = None) -> Attempt:
    attempt = Attempt(job)
    attempt.sent_at = sent_at
    usage = Usage()
    attempt.end = Done(job.job_id, FinishReason.STOP, usage) if error is None else Failed(job.job_id, error)
    return attempt


def call(runs: RunRegistry, job: InferenceJob, start: float, end: float, sent_at: float | None = None) -> Run:
    run = runs.admit(job, start)
    runs.job_ended(run, ended(job, sent_at=sent_at), Usage(10, 4, 5), 7, end)
    return run
