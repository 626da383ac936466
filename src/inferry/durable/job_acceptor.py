"""Stores the async jobs of concurrent requests in one transaction: what arrives during a write goes into the next.

Belongs to one event loop. A commit costs far more than a row, so the rate of acceptance grows with concurrency.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from inferry.domain.async_jobs import AsyncJob, CreatedJobs, JobToCreate
from inferry.domain.errors import GatewayError, LedgerUnavailable
from inferry.domain.storage import StorageLimits
from inferry.durable.executor import StoreExecutor
from inferry.durable.storage_quota import Headroom

MAX_JOBS = 256
MAX_BYTES = 8 * 1024 * 1024
"""Of one transaction, which other operations on the database wait for."""


class CreationStore(Protocol):
    """Where jobs are kept. Its methods block."""

    def create_many(self, jobs: Sequence[JobToCreate]) -> CreatedJobs: ...


class _Waiting(NamedTuple):
    new: JobToCreate
    stored: asyncio.Future[AsyncJob]


class JobAcceptor:
    """`on_stored` gets the job of each request once it is in the database, also where the request has gone."""

    def __init__(
        self,
        store: CreationStore,
        executor: StoreExecutor,
        limits: StorageLimits,
        on_stored: Callable[[AsyncJob], None],
    ) -> None:
        self._store = store
        self._executor = executor
        self._on_stored = on_stored
        self._bytes = Headroom(limits.max_bytes_per_tenant)
        self._jobs = Headroom(limits.max_jobs_per_tenant)
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def create(self, job: AsyncJob, body: bytes) -> AsyncJob:
        """The job, or the one that has its idempotency key. It is in the database when this returns.

        Raises StorageQuotaExceeded, QueueFull, Conflict, LedgerUnavailable.
        """
        loop = asyncio.get_running_loop()
        quota_bytes, max_unfinished = self._bytes.due(job.tenant, job.size), self._jobs.due(job.tenant, 1)
        one = _Waiting(JobToCreate(job, body, quota_bytes, max_unfinished), loop.create_future())
        self._waiting.append(one)
        if self._task is None:
            self._task = loop.create_task(self._write())
        return await one.stored

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    await self._store_all(batch)
                except LedgerUnavailable as error:
                    _fail(batch, error)
                except Exception as error:
                    # One that cannot be stored must not refuse the others.
                    for one in batch if len(batch) > 1 else ():
                        await self._store_alone(one)
                    _fail(batch, error)
        finally:
            self._task = None

    def _next_batch(self) -> list[_Waiting]:
        count, size = 0, 0
        for one in self._waiting[:MAX_JOBS]:
            size += len(one.new.body)
            if count and size > MAX_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _store_alone(self, one: _Waiting) -> None:
        try:
            await self._store_all([one])
        except Exception as error:
            _fail([one], error)

    async def _store_all(self, batch: Sequence[_Waiting]) -> None:
        created = await self._executor.run(self._store.create_many, [one.new for one in batch])
        for tenant, left in created.left_bytes.items():
            self._bytes.checked(tenant, left)
        for tenant, left in created.left_jobs.items():
            self._jobs.checked(tenant, left)
        for one, found in zip(batch, created.jobs, strict=True):
            if isinstance(found, GatewayError):
                _fail([one], found)
                continue
            self._on_stored(found)
            if not one.stored.done():
                one.stored.set_result(found)


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for one in batch:
        if not one.stored.done():
            one.stored.set_exception(error)
