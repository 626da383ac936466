"""The budget of a job as the loop sees it, and the end of a job whose budget is used up."""

from typing import Final, Protocol

from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError, LedgerUnavailable
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, End, FinishReason, Usage

BUDGET_HOLD_S = 5.0
"""Longest wait for a job's budget watermark to be written to the database."""
RETRY_AFTER_S: Final = 2.0
"""Told to a refused client where no better time is known."""


def watermark_timeout() -> LedgerUnavailable:
    """Ends a job whose budget watermarks are not in the database in time."""
    return LedgerUnavailable("the budget watermark was not written in time", retry_after_s=RETRY_AFTER_S)


class Budget(Protocol):
    """Grants tokens to running jobs and charges them at their end."""

    def renew_grant(self, job_id: str, written: int) -> int:
        """Extend the grant of a job that has written `written` tokens; returns the new total."""

    def charges_gpu_time(self) -> bool:
        """Whether some model has a price per GPU-hour, so that GPU time must be leased."""

    def lease_gpu_time(self, job_id: str, gpu_seconds: float) -> bool:
        """Lease what the job's GPU time so far costs; False where its budgets leave less."""

    def exhausted_error(self, job_id: str) -> GatewayError:
        """The error of a job that gets no further grant."""

    def ended(self, attempt: Attempt, usage: Usage, now: float) -> int | None:
        """Charge the job for its usage over all attempts; returns the cost in billionths."""

    def retry_refusal(self, job: InferenceJob) -> GatewayError | None:
        """Why a lost job must not be retried; None where it may."""


def budget_stop(attempt: Attempt, end: End, reason: GatewayError | None) -> Done:
    """The end of a job whose budget is used up: `Done`, with the usage that was delivered."""
    usage, job = end.usage, attempt.job
    prompt = usage.prompt_tokens or job.footprint.prompt.expected
    used = Usage(prompt, usage.cached_tokens, attempt.output_tokens, usage.gpu_seconds)
    return Done(end.job_id, FinishReason.LENGTH, used, stopped=reason)


def is_budget_capped(job: InferenceJob, end: End) -> bool:
    """Whether a job ended at an output limit that was set by its budget."""
    if job.payload.output_cap is None or not isinstance(end, Done):
        return False
    return end.finish is FinishReason.LENGTH and end.stopped is None
