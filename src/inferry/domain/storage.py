"""Stored content of tenants: documents, files, batches. Times are Unix seconds, `expires_at` None means no expiry.

`Database` is what the stores are written for. Its context managers block.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, Protocol, TypeVar

from msgspec import Struct

StoreMode = Literal["always", "never"]
Row = TypeVar("Row")


class Database(Protocol):
    """A SQLAlchemy connection per transaction. Raises LedgerUnavailable."""

    def reading(self) -> AbstractContextManager[Any]: ...
    def writing(self) -> AbstractContextManager[Any]: ...
    def close(self) -> None: ...


class Page(Struct, Generic[Row], frozen=True):
    """A part of a listing."""

    rows: Sequence[Row]
    has_more: bool


class StorageLimits(Struct, frozen=True, kw_only=True):
    """How much is stored, and for how long. None: no limit."""

    store: StoreMode = "always"
    """`never` stores no content: files, batches and async jobs are refused with 403 `storage_disabled`, and
    responses behave as with `store: false`."""
    response_ttl_s: float | None = 30 * 86_400.0
    """How long a response is stored, in seconds; null: until it is deleted."""
    file_ttl_s: float | None = 30 * 86_400.0
    """How long a file is stored that has no `expires_after`, in seconds; null: until it is deleted. The same for the
    results of batches."""
    max_file_bytes: int = 200 * 1024 * 1024
    """Maximum size of an uploaded file; a larger one gets 413 `body_too_large`."""
    max_bytes_per_tenant: int | None = 10 * 1024**3
    """Maximum stored bytes of a tenant; beyond it uploads, batches, async jobs and responses that are to be stored get
    413 `storage_quota_exceeded`. null sets no limit."""
    max_batch_items: int = 100_000
    """Maximum number of requests in a batch."""
    batch_concurrency: int = 64
    """Items of all batches that may be in flight at the same time, shared equally between tenants. Every running batch
    has at least one."""
    job_ttl_s: float | None = 7 * 86_400.0
    """How long an async job is stored after its end, in seconds; null: until it is deleted."""
    job_timeout_s: float = 86_400.0
    """Seconds after which an async job that has not ended expires, unless its `x-inferry-deadline-ms` is shorter."""
    job_concurrency: int = 64
    """Async jobs of one lane that may be in flight at the same time, shared equally between tenants. Every tenant has
    at least one."""
    max_jobs_per_tenant: int | None = 10_000
    """Maximum number of unfinished async jobs of a tenant; beyond it new ones get 429 `queue_full`. null sets no
    limit."""


class StorageStatistics(Struct, frozen=True, kw_only=True):
    """Stored work that has not ended, and bytes of stored content and of the whole database.

    `file_bytes`, `batch_bytes` and `async_job_bytes` are as counted for quotas. A callback is open while the receiver
    of an ended job has not confirmed it.
    """

    open_batches: int = 0
    open_async_jobs: int = 0
    open_callbacks: int = 0
    file_bytes: int = 0
    batch_bytes: int = 0
    async_job_bytes: int = 0
    database_bytes: int = 0


class Document(Struct, frozen=True, kw_only=True):
    """A JSON document of one tenant. `kind` and `id` name it there."""

    tenant: str
    kind: str
    id: str
    content: bytes
    created_at: float
    expires_at: float | None = None


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file of one tenant. It is visible once its `status` is `processed`; `size` is in bytes."""

    id: str
    tenant: str
    status: Literal["uploading", "processed", "deleted"]
    purpose: str
    filename: str
    size: int
    created_at: float
    expires_at: float | None = None


BatchApi = Literal["openai", "anthropic"]
BatchStatus = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
    "deleted",
]
UNFINISHED: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
Outcome = Literal["succeeded", "errored", "canceled", "expired"]


class BatchError(Struct, frozen=True):
    """Why an input file is invalid. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchDetail(Struct, frozen=True, kw_only=True):
    """What is stored of a batch and never searched for. `times` has the time at which each status began.

    `final` is the status that follows `finalizing`.
    """

    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_ttl_s: float | None = None
    errors: tuple[BatchError, ...] = ()
    times: dict[str, float] = {}
    final: BatchStatus = "completed"


class Batch(Struct, frozen=True, kw_only=True):
    """A batch of one tenant. Its items may run until `deadline`. `size`: stored bytes of its items."""

    id: str
    tenant: str
    key_id: str | None
    api: BatchApi
    status: BatchStatus
    endpoint: str
    created_at: float
    deadline: float
    detail: BatchDetail
    input_file: str | None = None
    output_file: str | None = None
    error_file: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    size: int = 0
    expires_at: float | None = None


class BatchItem(Struct, frozen=True):
    """One request of a batch. `tries` counts tries that were refused or failed.

    `is_charged`: the ledger has a row of the current try, from a process that ended before it had written the result.
    """

    number: int
    custom_id: str
    body: bytes
    tries: int = 0
    is_charged: bool = False


class ItemResult(Struct, frozen=True):
    """The result of an item, as a line of JSON without a line break."""

    batch_id: str
    number: int
    outcome: Outcome
    line: bytes


class ItemTry(Struct, frozen=True):
    """The next try of an item begins."""

    batch_id: str
    number: int
    tries: int


class ItemOutcome(Struct, frozen=True):
    """An item that has ended. `line` is None where it never ran."""

    number: int
    custom_id: str
    outcome: Outcome
    line: bytes | None


def item_id(batch_id: str, number: int) -> str:
    """The name of an item's work."""
    return f"{batch_id}-{number}"


def try_id(work_id: str, tries: int) -> str:
    """The job id of a try. It is the same in every process, so that the ledger charges a repeated try once."""
    return f"{work_id}-{tries}"
