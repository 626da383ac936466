"""Documents of tenants, asked for on the event loop."""

from collections.abc import Sequence
from typing import Protocol

from inferry.domain.clock import Clock
from inferry.domain.errors import StorageQuotaExceeded
from inferry.domain.storage import Document, Page
from inferry.durable.executor import StoreExecutor
from inferry.durable.storage_quota import StorageQuota


class DocumentStore(Protocol):
    """Where documents are kept. Its methods block."""

    def put(self, document: Document, *, replace: bool = True, quota_bytes: int | None = None) -> int | None: ...
    def swap(self, document: Document, content: bytes) -> bool: ...
    def get(self, tenant: str, kind: str, id: str, now: float) -> Document | None: ...
    def list(
        self,
        tenant: str,
        kind: str,
        now: float,
        *,
        after: str | None = None,
        limit: int = 20,
        newest_first: bool = True,
    ) -> Page[Document]: ...
    def of_kind(self, kind: str, now: float) -> Sequence[Document]: ...
    def ids_of_kind(self, kind: str) -> frozenset[tuple[str, str]]: ...
    def charged_jobs(self, job_ids: Sequence[str]) -> frozenset[str]: ...
    def delete(self, tenant: str, kind: str, id: str) -> bool: ...
    def delete_tenant(self, tenant: str) -> int: ...
    def sweep(self, now: float, limit: int) -> int: ...


class Documents:
    """JSON documents with a bounded life. A document is in the database when `put` returns.

    `quota` limits those that are stored with `is_limited`.
    """

    def __init__(
        self, store: DocumentStore, executor: StoreExecutor, clock: Clock, max_bytes_per_tenant: int | None = None
    ) -> None:
        self.quota = StorageQuota(max_bytes_per_tenant, clock.now)
        self._store = store
        self._executor = executor
        self._clock = clock

    async def put(
        self,
        tenant: str,
        kind: str,
        id: str,
        content: bytes,
        *,
        ttl_s: float | None,
        replace: bool = True,
        is_limited: bool = False,
    ) -> Document:
        """Store the document for `ttl_s` seconds, None: until it is deleted. Raises Conflict, StorageQuotaExceeded."""
        document = self._document(tenant, kind, id, content, ttl_s)
        quota_bytes = self.quota.due(tenant, len(content)) if is_limited else None
        try:
            left = await self._executor.run(self._store.put, document, replace=replace, quota_bytes=quota_bytes)
        except StorageQuotaExceeded:
            self.quota.exceeded(tenant)
            raise
        self.quota.stored(tenant, left)
        return document

    async def swap(self, tenant: str, kind: str, id: str, old: bytes, new: bytes, *, ttl_s: float | None) -> bool:
        """Replace the content of the document if it is still the old one; whether it was. Of several that replace the
        same content, in any process, one does.
        """
        return await self._executor.run(self._store.swap, self._document(tenant, kind, id, new, ttl_s), old)

    async def get(self, tenant: str, kind: str, id: str) -> Document | None:
        return await self._executor.run(self._store.get, tenant, kind, id, self._clock.wall())

    async def list(
        self, tenant: str, kind: str, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> Page[Document]:
        """Documents by creation, beginning behind the one with the id `after`."""
        return await self._executor.run(
            self._store.list, tenant, kind, self._clock.wall(), after=after, limit=limit, newest_first=newest_first
        )

    async def charged_jobs(self, job_ids: Sequence[str]) -> frozenset[str]:
        """Those of the jobs that the ledger has charged."""
        return await self._executor.run(self._store.charged_jobs, job_ids)

    async def of_kind(self, kind: str) -> Sequence[Document]:
        """The documents of all tenants, the oldest first."""
        return await self._executor.run(self._store.of_kind, kind, self._clock.wall())

    async def ids_of_kind(self, kind: str) -> frozenset[tuple[str, str]]:
        """Tenant and id of the documents of all tenants."""
        return await self._executor.run(self._store.ids_of_kind, kind)

    async def delete(self, tenant: str, kind: str, id: str) -> bool:
        """Whether there was such a document."""
        self.quota.freed(tenant)
        return await self._executor.run(self._store.delete, tenant, kind, id)

    def _document(self, tenant: str, kind: str, id: str, content: bytes, ttl_s: float | None) -> Document:
        now = self._clock.wall()
        expires_at = None if ttl_s is None else now + ttl_s
        return Document(tenant=tenant, kind=kind, id=id, content=content, created_at=now, expires_at=expires_at)
