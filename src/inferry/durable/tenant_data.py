"""Deletes what is stored for a tenant."""

from typing import Protocol

from msgspec import Struct

from inferry.durable.async_jobs import JobRunner
from inferry.durable.background import BackgroundResponses
from inferry.durable.batch_runner import BatchRunner
from inferry.durable.executor import StoreExecutor


class _Deletable(Protocol):
    def delete_tenant(self, tenant: str) -> int: ...


class _DeletableBatches(Protocol):
    def delete_tenant(self, tenant: str) -> tuple[int, list[str]]: ...


class _DeletableJobs(Protocol):
    def delete_tenant(self, tenant: str) -> list[str]: ...


class DeletedData(Struct, frozen=True, kw_only=True):
    """How many objects were deleted."""

    documents: int
    files: int
    batches: int
    jobs: int


class TenantData:
    """Belongs to one event loop."""

    def __init__(
        self,
        documents: _Deletable,
        files: _Deletable,
        batches: _DeletableBatches,
        jobs: _DeletableJobs,
        executor: StoreExecutor,
        runner: BatchRunner,
        job_runner: JobRunner,
        background: BackgroundResponses,
    ) -> None:
        self._documents = documents
        self._files = files
        self._batches = batches
        self._jobs = jobs
        self._executor = executor
        self._runner = runner
        self._job_runner = job_runner
        self._background = background

    async def delete(self, tenant: str) -> DeletedData:
        """Delete all stored content of a tenant. Running batches, jobs and background responses stop. Space is freed by
        the sweeper.
        """
        run = self._executor.run
        batches, unfinished = await run(self._batches.delete_tenant, tenant)
        for id in unfinished:
            self._runner.cancel(id)
        jobs = await run(self._jobs.delete_tenant, tenant)
        for id in jobs:
            self._job_runner.stop(id)
        await self._background.stop_tenant(tenant)
        return DeletedData(
            documents=await run(self._documents.delete_tenant, tenant),
            files=await run(self._files.delete_tenant, tenant),
            batches=batches,
            jobs=len(jobs),
        )
