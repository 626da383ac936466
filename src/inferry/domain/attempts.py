"""One attempt to run a job: a state machine shared by dispatch and simulator. Pure; its driver owns it."""

import enum
from typing import Final

from inferry.domain.decisions import Decision, to_text
from inferry.domain.errors import (
    CallAborted,
    ClientClosed,
    DeadlineExceeded,
    Draining,
    GatewayError,
    IngressLost,
    InvalidApiKey,
    Preempted,
    Prefilled,
    QueueTimeout,
    RequestTimeout,
    RunCancelled,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.plans import BatchPlan, PredictedWait
from inferry.domain.streams import Done, End, Placed, Usage

UNLIMITED: Final = 2**62 - 1
"""The largest number that compiled code compares without an object for it."""
RENEW_AHEAD_TOKENS: Final = 32
"""A job renews its budget lease this many tokens before it runs out."""


class AttemptState(enum.Enum):
    QUEUED = "queued"
    SENT = "sent"
    STREAMING = "streaming"
    ENDED = "ended"


class IllegalTransition(Exception):
    """The driver of an attempt violated its state machine."""


class Attempt:
    """queued -> sent -> streaming -> ended. Every attempt ends exactly once, from any state."""

    __slots__ = (
        "batch_fill",
        "batch_size",
        "decision",
        "end",
        "ended_at",
        "engine_batch",
        "first_token_at",
        "gap_counts",
        "gpu_estimated",
        "gpu_prefill_seconds",
        "gpu_seconds",
        "granted_tokens",
        "job",
        "last_token_at",
        "ledger_entry",
        "output_tokens",
        "placed",
        "plan",
        "predicted",
        "renew_at_tokens",
        "reported_tokens",
        "resumed",
        "sent_at",
        "settings_version",
        "slo_attained",
        "slo_start_at",
        "state",
        "usage_corrected",
    )

    def __init__(self, job: InferenceJob) -> None:
        self.job = job
        self.state = AttemptState.QUEUED
        self.plan: BatchPlan | None = None
        # Where the job runs, if its worker has passed it on.
        self.placed: Placed | None = None
        self.batch_size: int | None = None
        # Why it waited and why this worker; of an attempt that was never sent, why it waited.
        self.decision: Decision | None = None
        self.sent_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        # Where the metrics count the times between its tokens: looked up for the first one, and kept for the others.
        self.gap_counts: object = None
        self.ended_at: float | None = None
        self.end: End | None = None
        self.output_tokens = 0
        self.reported_tokens = 0
        # Output tokens of this attempt that the budgets allow, and when to renew the lease.
        self.granted_tokens = UNLIMITED
        self.renew_at_tokens = UNLIMITED
        # Whether every token so far met the lane's SLO; None where the lane has no target.
        self.slo_attained: bool | None = None
        # When the SLO began to run for the first token of this attempt: later for a long prompt and for an attempt that
        # resumes a job.
        self.slo_start_at = job.arrived_at + job.ttft_allowance_s
        self.predicted: PredictedWait | None = None
        # The settings it ran with; 0 where settings have no versions.
        self.settings_version = 0
        # Whether the worker reported a usage that cannot be true.
        self.usage_corrected = False
        # GPU-seconds on the worker and the part of the prompt, and whether they are estimates; None if not sent.
        self.gpu_seconds: float | None = None
        self.gpu_prefill_seconds = 0.0
        self.gpu_estimated: bool | None = None
        # Mean number of sequences that ran on the worker beside this attempt, itself included; part of its limit.
        self.engine_batch: float | None = None
        self.batch_fill: float | None = None
        self.ledger_entry: LedgerEntry | None = None
        # For an ended attempt whose job is retried: whether from what this one wrote (True) or from its start.
        self.resumed: bool | None = None

    def sent(self, plan: BatchPlan, now: float) -> None:
        if self.state is not AttemptState.QUEUED:
            raise IllegalTransition(f"{self.job.job_id}: sent while {self.state.value}")
        self.state = AttemptState.SENT
        self.plan = plan
        self.batch_size = len(plan.jobs)
        self.sent_at = now

    def first_token(self, now: float) -> None:
        if self.state is not AttemptState.SENT:
            raise IllegalTransition(f"{self.job.job_id}: first token while {self.state.value}")
        self.state = AttemptState.STREAMING
        self.first_token_at = self.last_token_at = now

    def grant(self, tokens: int) -> None:
        """Allow the job this many output tokens in total, earlier attempts included."""
        if tokens >= UNLIMITED:
            return
        before = 0 if self.job.resume_point is None else len(self.job.resume_point.output_ids)
        self.granted_tokens = tokens - before
        if tokens >= self.job.token_budget * self.job.payload.choices:
            self.renew_at_tokens = self.granted_tokens + 1  # the output limit ends it first
        else:
            self.renew_at_tokens = max(
                min(self.output_tokens + 1, self.granted_tokens), self.granted_tokens - RENEW_AHEAD_TOKENS
            )

    @property
    def granted(self) -> int:
        """The last grant, earlier attempts included."""
        if self.granted_tokens >= UNLIMITED:
            return UNLIMITED
        return self.granted_tokens + (0 if self.job.resume_point is None else len(self.job.resume_point.output_ids))

    def ended(self, end: End, now: float) -> None:
        if self.state is AttemptState.ENDED:
            raise IllegalTransition(f"{self.job.job_id}: ended twice")
        self.state = AttemptState.ENDED
        self.end = end
        self.ended_at = now

    @property
    def is_ended(self) -> bool:
        return self.state is AttemptState.ENDED

    @property
    def is_representative(self) -> bool:
        """Whether predictors may learn from the usage: it covers the whole job and is plausible."""
        return self.job.resume_point is None and not self.usage_corrected

    @property
    def has_delivered_output(self) -> bool:
        """Whether the client has received output of this job, in this attempt or an earlier one."""
        return self.job.stream and (self.first_token_at is not None or self.job.resume_point is not None)

    @property
    def shared_with(self) -> str | None:
        """The job that was executed, where the worker has passed this one on and it shares that job's execution.

        Stored work that is delivered again joins its own execution, of which the first gateway may leave no row.
        """
        shared = None if self.placed is None else self.placed.shared_with
        return None if shared == self.job.job_id else shared

    @property
    def prefill_tokens(self) -> int:
        """Expected prompt tokens to compute: on the worker that the job was sent to, once it is known."""
        footprint, decision = self.job.footprint, self.decision
        if decision is None or decision.picked_by is None:
            return footprint.prefill_tokens
        return max(1, footprint.prompt.expected - decision.cached_tokens)

    @property
    def finds_prefix(self) -> bool:
        """Whether its worker is expected to have all of the prompt that any worker has."""
        return self.prefill_tokens <= self.job.footprint.prefill_tokens

    @property
    def queue_s(self) -> float | None:
        return None if self.sent_at is None else self.sent_at - self.job.arrived_at

    def usage(self) -> Usage:
        """Usage of a finished attempt, as far as it is known. An attempt that shares an execution has used nothing."""
        end = self.end
        if end is None:
            raise IllegalTransition(f"{self.job.job_id}: not ended yet")
        if self.shared_with is not None:
            return Usage(gpu_seconds=0.0)
        usage = end.usage
        gpu_seconds = usage.gpu_seconds if self.gpu_seconds is None else self.gpu_seconds
        if not isinstance(end, Done) and isinstance(end.error, Prefilled):
            return Usage(gpu_seconds=gpu_seconds)  # the attempt that decodes has the tokens
        if isinstance(end, Done) or self.first_token_at is None:
            return Usage(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, gpu_seconds)
        # Lost without a usage report: the prompt was computed, and the delivered output is known.
        prompt = usage.prompt_tokens or self.job.footprint.prompt.expected
        return Usage(prompt, usage.cached_tokens, max(usage.output_tokens, self.output_tokens), gpu_seconds)

    def entry(self, wall: float, cost_nanos: int | None = None) -> LedgerEntry:
        """The ledger entry of a finished attempt."""
        if self.end is None or self.ended_at is None:
            raise IllegalTransition(f"{self.job.job_id}: not ended yet")
        job, end, usage = self.job, self.end, self.usage()
        decision = self.decision
        error: GatewayError | None = None if isinstance(end, Done) else end.error
        reported_error = end.stopped if isinstance(end, Done) else error
        if isinstance(reported_error, Prefilled):
            reported_error = None
        return LedgerEntry(
            job_id=job.job_id,
            attempt=job.attempt,
            tenant=job.tenant,
            run_id=job.run_id,
            step_id=job.step_id,
            model=job.route.model,
            lane=job.lane._name_,
            outcome=_outcome(error, self.has_delivered_output),
            ended_at=wall,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            gpu_seconds=usage.gpu_seconds,
            queue_ms=_elapsed_ms(self.sent_at, job.arrived_at),
            first_token_ms=_elapsed_ms(self.first_token_at, job.arrived_at),
            total_ms=(self.ended_at - job.arrived_at) * 1000,
            batch_size=self.batch_size,
            release_reason=None if self.plan is None else self.plan.reason._value_,
            worker=None if self.plan is None else self.plan.worker,
            parent_run=job.parent_run,
            finish=end.finish._value_ if isinstance(end, Done) else None,
            error_code=None if reported_error is None else reported_error.code,
            request_id=job.request_id or None,
            key_id=job.key_id,
            cost_nanos=cost_nanos,
            template_id=job.template_id,
            # A call that the engine refuses as invalid says nothing about latency.
            attained=None if error is not None and error.status == 400 else self.slo_attained,
            batching_ms=None if decision is None else decision.held_s * 1000,
            decision=None if decision is None else to_text(decision),
            engine_batch=self.engine_batch,
            batch_fill=self.batch_fill,
            gpu_estimated=self.gpu_estimated,
            settings_version=self.settings_version or None,
            composed=job.composed,
            shared_with=self.shared_with,
        )


def _outcome(error: GatewayError | None, has_delivered_output: bool) -> Outcome:
    match error:
        case None:
            return Outcome.DONE
        case IngressLost():
            return Outcome.FAILED  # free: the last attempt of the call pays
        case ClientClosed() | RunCancelled() | InvalidApiKey():
            return Outcome.CANCELLED
        case Draining() | CallAborted() if has_delivered_output:
            return Outcome.CANCELLED  # charged, unlike a failed attempt
        case QueueTimeout() | DeadlineExceeded() | RequestTimeout():
            return Outcome.EXPIRED
        case Prefilled():
            return Outcome.PREFILLED
        case Preempted():
            return Outcome.PREEMPTED
        case _:
            return Outcome.FAILED


def _elapsed_ms(then: float | None, start: float) -> float | None:
    return None if then is None else (then - start) * 1000
