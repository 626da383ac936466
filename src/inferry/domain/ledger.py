"""What the ledger keeps: one entry per attempt."""

import enum

from msgspec import Struct


class Outcome(enum.Enum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PREEMPTED = "preempted"


class LedgerFileLost(RuntimeError):
    """The database was deleted, or replaced by something that cannot be used, while it was open."""


class LedgerEntry(Struct, frozen=True, kw_only=True):
    """The account of one attempt. Appending the same (job_id, attempt) twice changes nothing.

    `cost_nanos` is money in billionths, None where no price is known. `shared_with` is the job whose execution this one
    shared instead of having its own. Waits are milliseconds; None says that it never got so far. `ended_at` is seconds
    since the Unix epoch.
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
