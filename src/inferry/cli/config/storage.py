"""The `storage` section of the configuration: what is stored for tenants, how much, and for how long."""

from collections.abc import Iterator

from msgspec import Struct

from inferry.cli.config.checks import check_positive
from inferry.domain.storage import StorageLimits, StoreMode


class StorageConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stored responses, files, batches and async jobs, in the ledger's database."""

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

    def limits(self) -> StorageLimits:
        return StorageLimits(**{name: getattr(self, name) for name in StorageLimits.__struct_fields__})


def check_storage(config: StorageConfig) -> Iterator[str]:
    yield from check_positive("storage", config, *(name for name in config.__struct_fields__ if name != "store"))
