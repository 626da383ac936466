"""Decisions of the scheduler, and the progress of jobs in flight reported to it."""

import enum
from typing import Final

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.domain.values import Value

PROGRESS_INTERVAL_TOKENS: Final = 32
"""Output is reported to the scheduler in units of this many tokens, and the rest at the end."""


class BatchPlan(Value):
    """Jobs sent to one worker together, in order. Never empty; one batch key if the worker pads.

    `precision`: the worker's, where it is stated.
    Such a worker pads every prompt to `padded_tokens`. The id of a job is its cancel handle: `Worker.cancel` removes it
    and leaves the others of the pass running.
    """

    def __init__(
        self,
        *,
        plan_id: int,
        worker: str,
        jobs: tuple[InferenceJob, ...],
        reason: ReleaseReason,
        formed_at: float,
        padded_tokens: int | None = None,
        precision: str | None = None,
    ) -> None:
        self.plan_id: Final = plan_id
        self.worker: Final = worker
        self.jobs: Final = jobs
        self.reason: Final = reason
        self.formed_at: Final = formed_at
        self.padded_tokens: Final = padded_tokens
        self.precision: Final = precision


class Tick(Value):
    """Result of `Scheduler.tick`. The same state and time give the same Tick."""

    def __init__(
        self,
        plans: tuple[BatchPlan, ...] = (),
        evictions: tuple[InferenceJob, ...] = (),
        expired: tuple[InferenceJob, ...] = (),
        wake_at: float | None = None,
    ) -> None:
        self.plans: Final = plans
        self.evictions: Final = evictions
        self.expired: Final = expired
        self.wake_at: Final = wake_at


class QueuedAhead(Value):
    """Work queued ahead of a job: jobs, uncached prompt tokens and output tokens, as expected."""

    def __init__(
        self,
        jobs: int = 0,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
    ) -> None:
        self.jobs: Final = jobs
        self.prompt_tokens: Final = prompt_tokens
        self.output_tokens: Final = output_tokens


class PredictedWait(Value):
    """Predicted queue wait of a job at its arrival: median and 90th percentile."""

    def __init__(
        self,
        p50_s: float,
        p90_s: float,
    ) -> None:
        self.p50_s = p50_s
        self.p90_s = p90_s


class FirstToken(Value):
    """Prefill has ended. `prompt_tokens`: prompt tokens computed, if the worker reports them."""

    def __init__(
        self,
        prompt_tokens: int | None = None,
    ) -> None:
        self.prompt_tokens: Final = prompt_tokens


class Produced(Value):
    """Output tokens since the last report."""

    def __init__(
        self,
        tokens: int,
    ) -> None:
        self.tokens: Final = tokens


class Ended(Value):
    """Sequence and KV are free. Actual token counts where known."""

    def __init__(
        self,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        self.prompt_tokens: Final = prompt_tokens
        self.cached_tokens: Final = cached_tokens
        self.output_tokens: Final = output_tokens


class JobLocation(enum.Enum):
    """Where a cancelled job was found."""

    QUEUED = "queued"
    PLANNED = "planned"
    UNKNOWN = "unknown"


class CapacityUse(Value):
    """Capacity of a worker in use by jobs in flight."""

    def __init__(
        self,
        sequences: int = 0,
        kv_tokens: int = 0,
        prefill_tokens: int = 0,
    ) -> None:
        self.sequences: Final = sequences
        self.kv_tokens: Final = kv_tokens
        self.prefill_tokens: Final = prefill_tokens
