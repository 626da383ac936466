"""Async jobs as clients see them: create, read, cancel, delete. The runner does the work."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from inferry.domain.async_jobs import (
    AsyncJob,
    AsyncJobDetail,
    AsyncJobStatus,
    CallbackSecret,
    CreatedJobs,
    Delivery,
    JobEnd,
    JobToCreate,
)
from inferry.domain.clock import Clock
from inferry.domain.errors import Conflict, InvalidRequest, NotFound, StorageDisabled
from inferry.domain.storage import Page, StorageLimits
from inferry.durable.callback_policy import CallbackForbidden, CallbackPolicy, parse_target
from inferry.durable.execute import Execute
from inferry.durable.executor import StoreExecutor
from inferry.durable.job_acceptor import JobAcceptor
from inferry.durable.stored_work import model_in


class ClientStore(Protocol):
    """Where jobs are kept. Its methods block."""

    def create_many(self, jobs: Sequence[JobToCreate]) -> CreatedJobs: ...
    def get(self, tenant: str, id: str, now: float) -> AsyncJob | None: ...
    def page(
        self, tenant: str, now: float, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> Page[AsyncJob]: ...
    def answer(self, id: str) -> bytes | None: ...
    def deliveries(self, id: str) -> list[Delivery]: ...
    def end(self, end: JobEnd) -> bool: ...
    def delete(self, tenant: str, id: str) -> bool: ...


class JobRunner(Protocol):
    """What takes jobs to their end: `AsyncJobRunner`, or `QueuedJobs` where gateways share a queue."""

    @property
    def ended(self) -> Counter[str]: ...
    def start(self) -> None: ...
    async def close(self) -> None: ...
    async def poll(self) -> None: ...
    def add(self, job: AsyncJob) -> None: ...
    def stop(self, id: str) -> None: ...
    def end_of(self, id: str, status: AsyncJobStatus) -> JobEnd: ...


class SecretStore(Protocol):
    def valid(self, tenant: str, now: float) -> list[CallbackSecret]: ...


class NewJob(Struct, frozen=True, kw_only=True):
    """What a client asks for. `deadline_ms` None: the gateway's own limit."""

    id: str
    tenant: str
    key_id: str | None
    endpoint: str
    lane: str
    body: bytes
    detail: AsyncJobDetail
    deadline_ms: int | None = None
    idempotency_key: str | None = None
    request_hash: bytes | None = None


class AsyncJobs:
    """The async jobs of all tenants. Belongs to one event loop."""

    def __init__(
        self,
        store: ClientStore,
        secrets: SecretStore,
        executor: StoreExecutor,
        runner: JobRunner,
        execute: Execute,
        limits: StorageLimits,
        policy: CallbackPolicy,
        clock: Clock,
    ) -> None:
        self._store = store
        self._secrets = secrets
        self._executor = executor
        self._runner = runner
        self._execute = execute
        self._limits = limits
        self._policy = policy
        self._clock = clock
        self._acceptor = JobAcceptor(store, executor, limits, self._on_stored)

    def require_enabled(self) -> None:
        """Raises StorageDisabled where nothing is stored."""
        if self._limits.store == "never":
            raise StorageDisabled("this gateway stores no content: async jobs are disabled")

    def endpoints(self) -> list[str]:
        """Endpoints whose requests can be jobs."""
        return sorted(self._execute.paths())

    async def create(self, new: NewJob) -> AsyncJob:
        """Accept a job. It is in the database when this returns.

        Raises InvalidRequest, StorageQuotaExceeded, QueueFull, Conflict.
        """
        self.require_enabled()
        now = self._clock.wall()
        url = new.detail.callback_url
        if url is not None:
            await self._check_callback(new.tenant, url, now)
        limit_s = self._limits.job_timeout_s
        left_s = limit_s if new.deadline_ms is None else min(limit_s, new.deadline_ms / 1000)
        job = AsyncJob(
            id=new.id,
            tenant=new.tenant,
            key_id=new.key_id,
            endpoint=new.endpoint,
            lane=new.lane,
            status="in_progress",
            created_at=now,
            deadline=now + left_s,
            detail=replace(new.detail, model=model_in(new.body)),
            size=len(new.body),
            callback=None if url is None else "waiting",
            idempotency_key=new.idempotency_key,
            request_hash=new.request_hash,
        )
        return await self._acceptor.create(job, new.body)

    def _on_stored(self, job: AsyncJob) -> None:
        if job.status == "in_progress":
            self._runner.add(job)

    async def _check_callback(self, tenant: str, url: str, now: float) -> None:
        try:
            parse_target(url, self._policy)
        except CallbackForbidden as error:
            raise InvalidRequest(f"`callback_url` {error}", param="callback_url") from None
        if not await self._executor.run(self._secrets.valid, tenant, now):
            message = (
                "the tenant has no callback secret; the operator creates one with `inferry callback-secrets rotate`"
            )
            raise InvalidRequest(message, param="callback_url")

    async def get(self, tenant: str, id: str) -> AsyncJob:
        """Raises NotFound."""
        job = await self._executor.run(self._store.get, tenant, id, self._clock.wall())
        if job is None:
            raise NotFound("no such job", param="job_id")
        return job

    async def list(
        self, tenant: str, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> Page[AsyncJob]:
        now = self._clock.wall()
        return await self._executor.run(
            self._store.page, tenant, now, after=after, limit=limit, newest_first=newest_first
        )

    async def answer(self, job: AsyncJob) -> bytes | None:
        """The body of the job's response; None where there is none."""
        return await self._executor.run(self._store.answer, job.id)

    async def deliveries(self, job: AsyncJob) -> Sequence[Delivery]:
        """The delivery log of the job's callback."""
        return await self._executor.run(self._store.deliveries, job.id)

    async def cancel(self, tenant: str, id: str) -> AsyncJob:
        """End a job; its call ends at once. Raises NotFound, and Conflict where it has ended otherwise."""
        job = await self.get(tenant, id)
        if await self._executor.run(self._store.end, self._runner.end_of(id, "cancelled")):
            self._runner.ended["cancelled"] += 1
            self._runner.stop(id)
        elif (job := await self.get(tenant, id)).status != "cancelled":
            raise Conflict(f"a job that is {job.status} cannot be cancelled")
        return await self.get(tenant, id)

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a job with its answer, its delivery log and its callback; end it if it runs. Raises NotFound."""
        if not await self._executor.run(self._store.delete, tenant, id):
            raise NotFound("no such job", param="job_id")
        self._runner.stop(id)
