"""Workers as the scheduler sees them."""

import enum
from typing import Literal

from msgspec import Struct

from inferry.domain.routes import OutputLength, WorkerRole

KvPacking = Literal["sum", "timed"]
EngineMode = Literal["continuous", "hybrid", "dynamic", "static"]
ToolFormatName = Literal["hermes", "llama3_json", "mistral"]
"""How the embedded engine batches sequences.

`continuous`: they join and leave in every step, prompts beside decodes. `hybrid`: likewise, but a step computes prompts
or decodes, and prompts are computed in groups. `static`: a padded pass runs until its last sequence has ended.
`dynamic`: a padded pass whose free rows are refilled.
"""

RECOMMENDED_CHUNK_TOKENS = 2048
"""Tokens per step that advice names. With them P0 attains its ITL target on an H200 (`gpu-rows.json`, Harbor: 100 %);
4,096 prompt tokens of an 8B model take 87 ms there, three intervals of that target."""


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class DirectWaits(Struct, frozen=True, gc=False):
    """What jobs would wait in the engine if every call went there at once: seconds by lane, at the 95th percentile.

    `prompt_token_s`: seconds per expected prompt token. `chunk_tokens`: prompt tokens in flight that keep the engine
    busy. `computed_token_s`: seconds per prompt token that the engine computes; None where that is not known.
    """

    waits_s: tuple[float, ...]
    prompt_token_s: float
    chunk_tokens: int
    computed_token_s: float | None = None


class Capacity(Struct, frozen=True, gc=False):
    """How much of a worker the gateway may use; None is no limit.

    Sequences, KV tokens (at the predicted peak) and prefill tokens are held by jobs in flight. `prefill_tokens_per_s`
    limits the rate of prefill while live sequences decode. `batch_sequences`: number of running sequences above which
    lanes without an SLO target are not sent. `direct` bounds how long jobs are held back.
    """

    sequences: int | None = None
    kv_tokens: int | None = None
    prefill_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    batch_sequences: int | None = None
    direct: DirectWaits | None = None


class Load(Struct, frozen=True, gc=False):
    """Load that a worker reports, from all clients."""

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0


class KvBlocks(Struct, frozen=True, array_like=True, gc=False):
    """The KV cache of an engine in blocks: all, held by sequences, cached, and the range that the held ones span.

    `kept`: the cached ones that are kept for the next call of a run.
    `prefix_queries`, `prefix_hits`: prompt tokens since its start, looked up in the prefix cache and found there.
    """

    blocks: int
    held: int
    cached: int
    kept: int
    span: int
    prefix_queries: int
    prefix_hits: int


class EngineCounts(Struct, frozen=True, gc=False):
    """An engine's own counters since its start: steps, prompt tokens computed, output tokens."""

    steps: int
    prompt_tokens: int
    output_tokens: int


class StepWork(Struct, frozen=True, gc=False):
    """What the steps of an engine have computed since its start.

    `prompt_tokens` and `decode_rows` (single tokens), and padding: `padding_tokens` of padded prompts, `padding_rows`
    in the place of decodes.
    """

    prompt_tokens: int
    decode_rows: int
    padding_tokens: int
    padding_rows: int


class WorkerView(Struct, frozen=True, kw_only=True):
    """A worker as observed at `observed_at`. Replaced, never mutated.

    `capacity` is a limit, not what is free: the scheduler counts its own jobs in flight. `foreign`: load of other
    clients. `pads`: a plan runs as one padded pass and needs one batch key. `refills`: jobs may join such a pass when
    one of its jobs has ended. `controlled`: `capacity` is the upper bound within which the capacity controller computes
    limits. `chunk_tokens`: token budget of an engine step. `counts` and `prefix_hits` (prompt tokens found in the
    prefix cache since the start) were read at `counted_at`.
    `gpus`: GPUs that the worker uses; 0 for a hosted API, whose GPU time is not accounted for. `busy_s`: seconds of its
    steps since its start, where it measures them. `step_work`: what these steps computed. `kv_blocks`: its KV cache,
    where it tells.
    `last_activity_at`: last sign of life; None if liveness is not monitored. `adapters` are those of `models` that are
    LoRA adapters. `output_length`: the jobs it prefers, by predicted output; None takes both alike. `kv_packing`:
    whether predicted KV peaks are added up, or their sum is predicted over time. `breaker_open`: it reports to be ready
    and is treated as down. `is_remote`: it passes jobs on to a process that queues and places them: no job is held or
    limited for it here, and it takes jobs of every lane. `scale_up_wait_s`: the worker stands for replicas that are
    started on demand; it gets no job itself, and a job whose model has no other worker waits this long for one.
    `overflow`: a hosted worker that takes only jobs whose deadline or target cannot be met elsewhere.
    `role`: what it computes of a call. One of role `prefill` is for prompts of at least `min_prefill_tokens` uncached
    tokens.
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
    output_length: OutputLength | None = None
    kv_packing: KvPacking = "sum"
    pads: bool = False
    refills: bool = False
    load: Load = Load()
    foreign: Load = Load()
    kv_capacity: int | None = None
    chunk_tokens: int | None = None
    controlled: bool = False
    prefix_hits: int | None = None
    counts: EngineCounts | None = None
    counted_at: float | None = None
    gpus: int = 1
    busy_s: float | None = None
    step_work: StepWork | None = None
    kv_blocks: KvBlocks | None = None
    last_activity_at: float | None = None
    breaker_open: bool = False
    is_remote: bool = False
    scale_up_wait_s: float | None = None
    overflow: bool = False
    role: WorkerRole = "both"
    min_prefill_tokens: int = 1
