"""Batches as clients see them: create, read, cancel, delete. The runner does the work."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from msgspec import Struct

from inferry.domain.clock import Clock
from inferry.domain.errors import Conflict, InvalidRequest, NotFound
from inferry.domain.storage import UNFINISHED, Batch, BatchApi, BatchDetail, BatchItem, Outcome, Page, StorageLimits
from inferry.durable.batch_lines import line_of
from inferry.durable.batch_output import Outcomes, outcome_pages
from inferry.durable.batch_runner import BatchRunner
from inferry.durable.execute import Execute
from inferry.durable.executor import StoreExecutor
from inferry.durable.files import Files
from inferry.durable.ids import new_id

CANCELLABLE = ("validating", "in_progress")
_PREFIXES: dict[BatchApi, str] = {"openai": "batch_", "anthropic": "msgbatch_"}


class ClientStore(Outcomes, Protocol):
    """Where batches are kept. Its methods block."""

    def create(self, batch: Batch, items: Sequence[BatchItem], quota_bytes: int | None) -> None: ...
    def get(self, tenant: str, api: BatchApi, id: str, now: float) -> Batch | None: ...
    def page(
        self,
        tenant: str,
        api: BatchApi,
        now: float,
        *,
        after: str | None = None,
        limit: int = 20,
        newest_first: bool = True,
    ) -> Page[Batch]: ...
    def outcome_counts(self, id: str) -> dict[Outcome, int]: ...
    def move(self, id: str, current: Any, status: Any, now: float, **changes: Any) -> bool: ...


class NewBatch(Struct, frozen=True, kw_only=True):
    """What a client asks for. `window_s`: seconds in which the items may run."""

    tenant: str
    key_id: str | None
    api: BatchApi
    endpoint: str
    window_s: float
    detail: BatchDetail
    input_file: str | None = None
    items: Sequence[BatchItem] = ()


class Batches:
    """The batches of all tenants. Belongs to one event loop."""

    def __init__(
        self,
        store: ClientStore,
        files: Files,
        executor: StoreExecutor,
        runner: BatchRunner,
        execute: Execute,
        clock: Clock,
    ) -> None:
        self._store = store
        self._files = files
        self._executor = executor
        self._runner = runner
        self._execute = execute
        self._clock = clock

    @property
    def limits(self) -> StorageLimits:
        return self._files.limits

    def require_enabled(self) -> None:
        """Raises StorageDisabled where nothing is stored."""
        self._files.require_enabled()

    def endpoints(self) -> list[str]:
        """Endpoints whose requests can be batched."""
        return sorted(self._execute.paths())

    async def create(self, new: NewBatch) -> Batch:
        """Accept a batch. It is in the database when this returns. Raises InvalidRequest, StorageQuotaExceeded."""
        self.require_enabled()
        now = self._clock.wall()
        if new.input_file is not None:
            file = await self._files.get(new.tenant, new.input_file)
            if file is None:
                raise InvalidRequest("no such file", param="input_file_id")
            if file.purpose != "batch":
                raise InvalidRequest("the purpose of the input file must be batch", param="input_file_id")
        status = "validating" if new.input_file is not None else "in_progress"
        batch = Batch(
            id=new_id(_PREFIXES[new.api]),
            tenant=new.tenant,
            key_id=new.key_id,
            api=new.api,
            status=status,  # type: ignore[arg-type]
            endpoint=new.endpoint,
            created_at=now,
            deadline=now + new.window_s,
            detail=new.detail,
            input_file=new.input_file,
            total=len(new.items),
            size=sum(len(item.body) for item in new.items),
        )
        await self._executor.run(self._store.create, batch, new.items, self.limits.max_bytes_per_tenant)
        self._runner.add(batch.id)
        return batch

    async def get(self, tenant: str, api: BatchApi, id: str) -> Batch:
        """Raises NotFound."""
        batch = await self._executor.run(self._store.get, tenant, api, id, self._clock.wall())
        if batch is None:
            raise NotFound("no such batch", param="batch_id")
        return batch

    async def find_unfinished(self, tenant: str, id: str) -> Batch | None:
        """The batch of either API with this id, unless it has finished."""
        api = next((api for api, prefix in _PREFIXES.items() if id.startswith(prefix)), None)
        if api is None:
            return None
        batch = await self._executor.run(self._store.get, tenant, api, id, self._clock.wall())
        return batch if batch is not None and batch.status in UNFINISHED else None

    async def list(
        self, tenant: str, api: BatchApi, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> Page[Batch]:
        now = self._clock.wall()
        return await self._executor.run(
            self._store.page, tenant, api, now, after=after, limit=limit, newest_first=newest_first
        )

    async def outcome_counts(self, batch: Batch) -> dict[Outcome, int]:
        return await self._executor.run(self._store.outcome_counts, batch.id)

    async def cancel(self, tenant: str, api: BatchApi, id: str) -> Batch:
        """Stop a batch. Raises NotFound, and Conflict where it has finished."""
        batch = await self.get(tenant, api, id)
        now = self._clock.wall()
        if await self._executor.run(self._store.move, id, CANCELLABLE, "cancelling", now, final="cancelled"):
            self._runner.cancel(id)
        elif batch.status not in ("cancelling", "cancelled"):
            raise Conflict(f"a batch that is {batch.status} cannot be cancelled")
        return await self.get(tenant, api, id)

    async def delete(self, tenant: str, api: BatchApi, id: str) -> None:
        """Delete a batch that has finished, with its results. Raises NotFound, Conflict."""
        batch = await self.get(tenant, api, id)
        if batch.status in UNFINISHED:
            raise Conflict("the batch is still being processed; cancel it first")
        await self._executor.run(self._store.move, id, (batch.status,), "deleted", self._clock.wall())

    async def result_lines(self, batch: Batch) -> AsyncIterator[bytes]:
        """The results of a batch in the order of its items, several lines at a time."""
        async for page in outcome_pages(batch, self._store, self._executor):
            yield b"".join(line_of(batch, item) for item in page)
