"""Ledger entries: one per attempt."""

import enum

from msgspec import Struct


class Outcome(enum.Enum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PREEMPTED = "preempted"
    PREFILLED = "prefilled"


class LedgerUnusable(RuntimeError):
    """The ledger cannot be opened, or does not answer. The message is for the operator."""


class LedgerMissing(LedgerUnusable):
    """The ledger does not exist yet."""


class LedgerLocked(LedgerUnusable):
    """Another gateway uses the database."""


class LedgerFileLost(RuntimeError):
    """The database file was deleted or replaced while it was open."""


class RetentionPolicy(Struct, frozen=True, kw_only=True):
    """How long rows are kept, in seconds. None: for good."""

    attempts_s: float | None = 90 * 86_400.0
    gpu_time_s: float | None = 90 * 86_400.0
    rollups_s: float | None = 730 * 86_400.0


class GpuTimeKind(enum.Enum):
    """What a worker's GPUs spent time on. `WORK` is output that was delivered, or is still being produced. The next
    three are waste: attempts that their client, run or deadline ended; attempts preempted and started over; and work
    done twice, which is the prompt of an attempt that resumes a job, and attempts whose output was lost.
    """

    WORK = "work"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    RECOMPUTED = "recomputed"
    IDLE = "idle"
    UNATTRIBUTED = "unattributed"


class GpuTimeRow(Struct, frozen=True, kw_only=True):
    """GPU-seconds of one kind on one worker from `started_at` to `ended_at` (Unix seconds). The rows of an interval add
    up to its length times the worker's GPUs. Appending the same (worker, started_at, kind) again has no effect.
    """

    worker: str
    started_at: float
    kind: str
    ended_at: float
    gpu_seconds: float


class ComposedRow(Struct, frozen=True, kw_only=True):
    """How one call of a composed model was answered. Appending the same `call_id` again has no effect.

    `path`: the models that were called, with `>` between them. `accepted`: of a cascade, whether the small model
    answered. `reason`: of a route, `rule`, `label` or `default`; of an ensemble, how the answer was chosen. `score`:
    what the threshold was compared with; of a vote, the part of the votes that won. `agreed`: whether a sampled
    comparison found the same answer; None where none was made. `ended_at`: Unix seconds.
    """

    call_id: str
    ended_at: float
    tenant: str
    name: str
    kind: str
    path: str
    accepted: bool
    reason: str
    score: float | None = None
    agreed: bool | None = None


class LedgerEntry(Struct, frozen=True, kw_only=True):
    """One attempt. Appending the same (job_id, attempt) again has no effect.

    `cost_nanos`: cost in billionths of the currency, None without a price. `shared_with`: the job whose execution this
    one shared. Waits are milliseconds, None if the attempt did not get that far; `batching_ms` is the part of
    `queue_ms` that the job was held back to share a batch. `engine_batch` and `batch_fill`: mean number of sequences
    running on the worker while the attempt ran, and the fraction of the worker's limit. `gpu_estimated`: whether
    `gpu_seconds` is an estimate. `attained`: whether every token met the lane's target, None without one. `ended_at`:
    Unix seconds. `decision`: why the job waited and why its worker was picked, as JSON (`domain.decisions`).
    `settings_version`: the version of the settings that the attempt ran with.
    `composed`: the composed model and stage that the job is a step of, as `name/stage`.
    """

    job_id: str
    attempt: int
    tenant: str
    run_id: str
    step_id: str
    model: str
    lane: str
    outcome: Outcome
    ended_at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_seconds: float | None = None
    queue_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float = 0.0
    batch_size: int | None = None
    release_reason: str | None = None
    worker: str | None = None
    parent_run: str | None = None
    finish: str | None = None
    error_code: str | None = None
    request_id: str | None = None
    key_id: str | None = None
    cost_nanos: int | None = None
    shared_with: str | None = None
    template_id: str | None = None
    attained: bool | None = None
    batching_ms: float | None = None
    engine_batch: float | None = None
    batch_fill: float | None = None
    gpu_estimated: bool | None = None
    decision: str | None = None
    settings_version: int | None = None
    composed: str | None = None
