"""Documents of tenants, asked for on the event loop."""

from collections.abc import Sequence
from typing import Protocol

from inferry.domain.clock import Clock
from inferry.domain.storage import Document, Page
from inferry.durable.executor import StoreExecutor


class DocumentStore(Protocol):
    """Where documents are kept. Its methods block."""

    def put(self, document: Document, *, replace: bool = True) -> None: ...
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
    def delete(self, tenant: str, kind: str, id: str) -> bool: ...
    def delete_tenant(self, tenant: str) -> int: ...
    def sweep(self, now: float, limit: int) -> int: ...


class Documents:
    """JSON documents with a bounded life. A document is in the database when `put` returns."""

    def __init__(self, store: DocumentStore, executor: StoreExecutor, clock: Clock) -> None:
        self._store = store
        self._executor = executor
        self._clock = clock

    async def put(
        self, tenant: str, kind: str, id: str, content: bytes, *, ttl_s: float | None, replace: bool = True
    ) -> Document:
        """Store the document for `ttl_s` seconds, None: until it is deleted. Raises Conflict."""
        now = self._clock.wall()
        document = Document(
            tenant=tenant,
            kind=kind,
            id=id,
            content=content,
            created_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
        )
        await self._executor.run(self._store.put, document, replace=replace)
        return document

    async def get(self, tenant: str, kind: str, id: str) -> Document | None:
        return await self._executor.run(self._store.get, tenant, kind, id, self._clock.wall())

    async def list(
        self, tenant: str, kind: str, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> Page[Document]:
        """Documents by creation, beginning behind the one with the id `after`."""
        return await self._executor.run(
            self._store.list, tenant, kind, self._clock.wall(), after=after, limit=limit, newest_first=newest_first
        )

    async def of_kind(self, kind: str) -> Sequence[Document]:
        """The documents of all tenants, the oldest first."""
        return await self._executor.run(self._store.of_kind, kind, self._clock.wall())

    async def delete(self, tenant: str, kind: str, id: str) -> bool:
        """Whether there was such a document."""
        return await self._executor.run(self._store.delete, tenant, kind, id)
