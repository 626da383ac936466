"""Deletes what is stored for a tenant."""

from typing import Protocol

from msgspec import Struct

from inferry.durable.batch_runner import BatchRunner
from inferry.durable.executor import StoreExecutor


class _Deletable(Protocol):
    def delete_tenant(self, tenant: str) -> int: ...


class _DeletableBatches(Protocol):
    def delete_tenant(self, tenant: str) -> tuple[int, list[str]]: ...


class DeletedData(Struct, frozen=True, kw_only=True):
    """How many objects were deleted."""

    documents: int
    files: int
    batches: int


class TenantData:
    """Belongs to one event loop."""

    def __init__(
        self,
        documents: _Deletable,
        files: _Deletable,
        batches: _DeletableBatches,
        executor: StoreExecutor,
        runner: BatchRunner,
    ) -> None:
        self._documents = documents
        self._files = files
        self._batches = batches
        self._executor = executor
        self._runner = runner

    async def delete(self, tenant: str) -> DeletedData:
        """Delete all stored content of a tenant. Running batches stop. Space is freed by the sweeper."""
        run = self._executor.run
        batches, unfinished = await run(self._batches.delete_tenant, tenant)
        for id in unfinished:
            self._runner.cancel(id)
        return DeletedData(
            documents=await run(self._documents.delete_tenant, tenant),
            files=await run(self._files.delete_tenant, tenant),
            batches=batches,
        )
