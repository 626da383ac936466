"""What the loop asks of whoever pays for jobs, and how a job ends whose budget is used up."""

from typing import Protocol

from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, End, FinishReason, Usage

BUDGET_HOLD_S = 5.0
"""How long a job waits until what it may use of its budgets is in the database."""


class Budget(Protocol):
    """Who pays for jobs. Asked while they run, told of the end of each."""

    def renew_grant(self, job_id: str, written: int) -> int:
        """A job is about to have written what it was granted: how much it may write in all from now on."""

    def exhausted_error(self, job_id: str) -> GatewayError:
        """Why it gets no more."""

    def ended(self, attempt: Attempt, usage: Usage, now: float) -> int | None:
        """The job is over and used so much, over all its attempts; returns what that costs, in billionths."""

    def retry_refusal(self, job: InferenceJob) -> GatewayError | None:
        """Why a job that was lost is not to be tried again, if it is not."""


def budget_stop(attempt: Attempt, end: End, reason: GatewayError | None) -> Done:
    """The end of a job that was stopped because its budget is used up: not a failure, and no more than it got."""
    usage, job = end.usage, attempt.job
    prompt = usage.prompt_tokens or job.footprint.prompt.expected
    used = Usage(prompt, usage.cached_tokens, attempt.output_tokens, usage.gpu_seconds)
    return Done(end.job_id, FinishReason.LENGTH, used, stopped=reason)


def is_budget_capped(job: InferenceJob, end: End) -> bool:
    """Whether a job ended at a limit that was cut to what was left of its budget."""
    if job.payload.output_cap is None or not isinstance(end, Done):
        return False
    return end.finish is FinishReason.LENGTH and end.stopped is None
