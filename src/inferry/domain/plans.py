"""What the scheduler decides, and what it is told of jobs it has sent."""

import enum
from typing import Final

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.domain.values import Value


class BatchPlan(Value):
    """Jobs that go to one worker together, in order. Never empty; one batch key where the worker pads."""

    def __init__(
        self,
        *,
        plan_id: int,
        worker: str,
        jobs: tuple[InferenceJob, ...],
        reason: ReleaseReason,
        formed_at: float,
        padded_tokens: int | None = None,
    ) -> None:
        self.plan_id: Final = plan_id
        self.worker: Final = worker
        self.jobs: Final = jobs
        self.reason: Final = reason
        self.formed_at: Final = formed_at
        self.padded_tokens: Final = padded_tokens


class Tick(Value):
    """What one call of `tick` decided. The same state and the same now give the same Tick."""

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
    """What is queued before a job that would come now, as far as it is expected: jobs, and tokens to compute for them.

    `prompt_tokens` leaves out what is expected to be cached.
    """

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
    """How long a job was expected to wait when it came: half of such jobs no longer than `p50_s`, nine in ten no longer
    than `p90_s`.
    """

    def __init__(
        self,
        p50_s: float,
        p90_s: float,
    ) -> None:
        self.p50_s = p50_s
        self.p90_s = p90_s


class FirstToken(Value):
    """The job's prefill is over; `prompt_tokens` is what the worker really computed, where it says so."""

    def __init__(
        self,
        prompt_tokens: int | None = None,
    ) -> None:
        self.prompt_tokens: Final = prompt_tokens


class Produced(Value):
    """The job has written this many more tokens since it was last heard of."""

    def __init__(
        self,
        tokens: int,
    ) -> None:
        self.tokens: Final = tokens


class Ended(Value):
    """The job's sequence and KV are free again; what it really used, where that is known."""

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
    """How much of a worker the jobs in flight take up."""

    def __init__(
        self,
        sequences: int = 0,
        kv_tokens: int = 0,
        prefill_tokens: int = 0,
    ) -> None:
        self.sequences: Final = sequences
        self.kv_tokens: Final = kv_tokens
        self.prefill_tokens: Final = prefill_tokens
