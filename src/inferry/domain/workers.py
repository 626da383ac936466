"""What the scheduler believes about workers."""

import enum

from msgspec import Struct


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class Capacity(Struct, frozen=True, gc=False):
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

    `capacity` is a limit, not what is left: the scheduler alone counts its own use in flight. `foreign` is use that did
    not come from this gateway. `pads` says that a plan runs as one padded pass and so needs one batch key. `controlled`
    says that its room is what it holds at most, within which the gateway computes how much of it to use;
    `chunk_tokens` is what it computes in one step. `counts` are its own, and `prefix_hits` is how many prompt tokens it
    has found in its cache since it started, where it tells; both were read at `counted_at`. `last_activity_at` is its
    last sign of life; None where it is not watched.
    """

    worker: str
    models: frozenset[str]
    phase: Phase
    capacity: Capacity
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
    last_activity_at: float | None = None
