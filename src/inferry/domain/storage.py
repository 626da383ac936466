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
    response_ttl_s: float | None = 30 * 86_400.0
    file_ttl_s: float | None = 30 * 86_400.0
    max_file_bytes: int = 200 * 1024 * 1024
    max_bytes_per_tenant: int | None = 10 * 1024**3
    max_batch_items: int = 100_000
    batch_concurrency: int = 64


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
