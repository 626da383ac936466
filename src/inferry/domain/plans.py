"""What the scheduler believes about workers and what it decides."""

import enum

from msgspec import Struct

from inferry.domain.jobs import InferenceJob


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class Room(Struct, frozen=True, gc=False):
    """How much of a worker the gateway may use; None means that currency does not bind.

    Three are held until given back: sequences, KV tokens at the predicted peak, prompt tokens in prefill. The fourth,
    prompt tokens per second, bounds how fast prefill is sent while live sequences decode. `batch_sequences` is how many
    sequences may run before lanes that promise nothing are kept out.
    """

    sequences: int | None = None
    kv_tokens: int | None = None
    prefill_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    batch_sequences: int | None = None


class Load(Struct, frozen=True, gc=False):
    """What a worker says it is doing, whoever sent the work."""

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0


class EngineCounts(Struct, frozen=True, gc=False):
    """What an engine has done since it started, as it counts it: steps, prompt tokens computed, tokens written."""

    steps: int
    prompt_tokens: int
    output_tokens: int


class WorkerView(Struct, frozen=True, kw_only=True):
    """A belief about one worker, with a date. Replaced, never mutated.

    `room` is a limit, not what is left: the scheduler alone counts its own use in flight. `foreign` is use that did
    not come from this gateway. `pads` says that a plan runs as one padded pass and so needs one batch key. `controlled`
    says that its room is what it holds at most, within which the gateway computes how much of it to use;
    `chunk_tokens` is what it computes in one step. `counts` are its own, and `prefix_hits` is how many prompt tokens it
    has found in its cache since it started, where it tells; both were read at `counted_at`. `heard_at` is its last sign
    of life; None where it is not watched.
    """

    worker: str
    models: frozenset[str]
    phase: Phase
    room: Room
    observed_at: float
    group: str = "default"
    adapters: frozenset[str] = frozenset()
    precision: str | None = None
    isolation: str | None = None
    pads: bool = False
    load: Load = Load()
    foreign: Load = Load()
    kv_capacity: int | None = None
    chunk_tokens: int | None = None
    controlled: bool = False
    prefix_hits: int | None = None
    counts: EngineCounts | None = None
    counted_at: float | None = None
    heard_at: float | None = None


class ReleaseReason(enum.Enum):
    """Why a plan was formed when it was."""

    IMMEDIATE = "immediate"
    """Nothing to wait for: the lane or the worker gains nothing by holding."""
    SIZE = "size"
    """The group held for company was full."""
    WINDOW = "window"
    """The coalescing window of the oldest job held was over."""
    SIBLING = "sibling"
    """Jobs of one run or template that begin alike were ready at the same time and went together."""
    MAX_WAIT = "max_wait"
    """The job had been held for all it allows and went alone."""
    DEADLINE = "deadline"
    """Holding any longer would have eaten the time left before the deadline."""


class BatchPlan(Struct, frozen=True, kw_only=True):
    """Jobs that go to one worker together, in order. Never empty; one batch key where the worker pads."""

    plan_id: int
    worker: str
    jobs: tuple[InferenceJob, ...]
    reason: ReleaseReason
    formed_at: float
    padded_tokens: int | None = None


class Tick(Struct, frozen=True):
    """What one call of `tick` decided. The same state and the same now give the same Tick."""

    plans: tuple[BatchPlan, ...] = ()
    evictions: tuple[InferenceJob, ...] = ()
    expired: tuple[InferenceJob, ...] = ()
    wake_at: float | None = None


class Ahead(Struct, frozen=True, gc=False):
    """What is queued before a job that would come now, as far as it is expected: jobs, and tokens to compute for them.

    `prompt_tokens` leaves out what is expected to be cached.
    """

    jobs: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class PredictedWait(Struct, gc=False):
    """How long a job was expected to wait when it came: half of such jobs no longer than `p50_s`, nine in ten no longer
    than `p90_s`.
    """

    p50_s: float
    p90_s: float


class FirstToken(Struct, frozen=True, gc=False):
    """The job's prefill is over; `prompt_tokens` is what the worker really computed, where it says so."""

    prompt_tokens: int | None = None


class Produced(Struct, frozen=True, gc=False):
    """The job has written this many more tokens since it was last heard of."""

    tokens: int


class Ended(Struct, frozen=True, gc=False):
    """The job's sequence and KV are free again; what it really used, where that is known."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class Whereabouts(enum.Enum):
    """Where a cancelled job was found."""

    QUEUED = "queued"
    PLANNED = "planned"
    UNKNOWN = "unknown"


class Use(Struct, frozen=True, gc=False):
    """How much of a worker the jobs in flight take up."""

    sequences: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
