"""Takes batches from status to status until they are finished, also those that a killed process left.

Belongs to the event loop it is started on. Each batch has one task. Every step reads the batch's state from the
database and leaves it there, so that a step that was cut off, or that failed because the database did, is repeated.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from inferry.domain.clock import Clock
from inferry.domain.storage import UNFINISHED, Batch, BatchItem, ItemOutcome, ItemResult, ItemTry, Outcome, StoredFile
from inferry.domain.work_queue import WorkQueue
from inferry.durable.batch_output import write_files
from inferry.durable.batch_run import BatchRun
from inferry.durable.batch_validation import Validation
from inferry.durable.execute import Execute
from inferry.durable.executor import StoreExecutor
from inferry.durable.files import Files
from inferry.durable.outages import until_done
from inferry.durable.provider_run import ProviderRun, Providers
from inferry.durable.queued_batch_run import QueuedBatchRun
from inferry.durable.result_recorder import ResultRecorder

log = logging.getLogger(__name__)

PAGE_ITEMS = 64
PAGE_BYTES = 1024 * 1024
INITIAL_RETRY_S, MAX_RETRY_S = 0.5, 30.0


class RunnerStore(Protocol):
    """Where batches are kept. Its methods block."""

    def load(self, id: str) -> Batch | None: ...
    def unfinished(self) -> list[str]: ...
    def move(self, id: str, current: Any, status: Any, now: float, **changes: Any) -> bool: ...
    def clear_items(self, id: str) -> None: ...
    def add_items(self, id: str, items: list[BatchItem]) -> list[BatchItem]: ...
    def pending(self, id: str, after: int, limit: int, max_bytes: int) -> list[BatchItem]: ...
    def record(self, records: list[ItemResult | ItemTry]) -> None: ...
    def end_pending(self, id: str, outcome: Outcome) -> int: ...
    def outcome_counts(self, id: str) -> dict[Outcome, int]: ...
    def outcomes(self, id: str, after: int, max_bytes: int) -> list[ItemOutcome]: ...
    def finish(self, id: str, now: float, output: StoredFile | None, errors: StoredFile | None) -> None: ...


class BatchRunner:
    """All batches of the gateway. With a `queue` their items run at all gateways that share it."""

    def __init__(
        self,
        store: RunnerStore,
        files: Files,
        executor: StoreExecutor,
        execute: Execute,
        clock: Clock,
        *,
        max_line_bytes: int,
        write_ledger: Callable[[], object],
        providers: Providers,
        queue: WorkQueue | None = None,
    ) -> None:
        self._providers = providers
        self._queue = queue
        self._store = store
        self._files = files
        self._executor = executor
        self._execute = execute
        self._clock = clock
        self._max_line_bytes = max_line_bytes
        self._recorder = ResultRecorder(store, executor, write_ledger)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun | QueuedBatchRun] = {}
        self._provider_runs: dict[str, ProviderRun] = {}
        self._tenants: dict[str, str] = {}
        self._cancelled: set[str] = set()
        self._is_stopped = False
        self.ended: Counter[str] = Counter()
        """Batches that this process took to their end, by status."""

    def start(self) -> None:
        """Continue what is not finished."""
        self._is_stopped = False
        self._tasks[""] = asyncio.get_running_loop().create_task(self._resume())

    async def _resume(self) -> None:
        found = await until_done(partial(self._executor.run, self._store.unfinished), "read unfinished batches")
        if found:
            log.info("continuing %d unfinished batches", len(found))
        for id in found:
            self.add(id)

    async def poll(self) -> None:
        """Process what other gateways have accepted."""
        for id in await self._executor.run(self._store.unfinished):
            self.add(id)

    def add(self, id: str) -> None:
        """Process a batch that is in the database. After `close` this is left to another gateway."""
        if id not in self._tasks and not self._is_stopped:
            task = self._tasks[id] = asyncio.get_running_loop().create_task(self._process(id))
            task.add_done_callback(lambda _: self._tasks.pop(id, None))

    def cancel(self, id: str) -> None:
        """The batch's status has changed: stop its items now."""
        runs = [found for runs in (self._runs, self._provider_runs) if (found := runs.get(id)) is not None]
        for run in runs:
            run.cancel()
        if not runs and id in self._tasks:
            self._cancelled.add(id)

    async def close(self) -> None:
        """Stop. Items in flight run again after the next `start`, here or at another gateway."""
        self._is_stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._recorder.close()

    async def _process(self, id: str) -> None:
        delay_s = INITIAL_RETRY_S
        while True:
            try:
                await self._advance(id)
                return
            except Exception as error:
                log.error("batch %s is interrupted (next try in %.1f s): %s", id, delay_s, type(error).__name__)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)
            finally:
                self._cancelled.discard(id)

    async def _advance(self, id: str) -> None:
        """Take the batch to its end."""
        store, run = self._store, self._executor.run
        while (batch := await run(store.load, id)) is not None and batch.status in UNFINISHED:
            if batch.status == "validating":
                await self._validate(batch)
            elif batch.status == "in_progress":
                await self._run(batch)
            else:
                if batch.status == "cancelling":
                    await self._run_providers(batch, is_cancelled=True)
                    await run(store.end_pending, id, "canceled")
                output = errors = None
                if batch.api == "openai":
                    output, errors = await write_files(batch, store, self._files, self._executor)
                await run(store.finish, id, self._clock.wall(), output, errors)
        if batch is not None:
            self.ended[batch.status] += 1

    async def _validate(self, batch: Batch) -> None:
        validation = Validation(batch, self._files, self._store, self._executor, self._max_line_bytes)
        await validation.run()
        now = self._clock.wall()
        if validation.errors:
            await self._move(batch.id, "validating", "failed", now, errors=tuple(validation.errors))
        else:
            await self._move(batch.id, "validating", "in_progress", now)

    async def _run(self, batch: Batch) -> None:
        """Run the items. Providers execute those that were assigned to them, at the same time."""
        id = batch.id
        is_cancelled = id in self._cancelled
        if not is_cancelled:
            await ProviderRun(self._providers, batch, self._recorder).assign()
        async with asyncio.TaskGroup() as tasks:
            own = tasks.create_task(self._run_own(batch, is_cancelled=is_cancelled))
            provided = tasks.create_task(self._run_providers(batch, is_cancelled=is_cancelled))
        is_cancelled = own.result() or provided.result().is_cancelled
        if not is_cancelled and provided.result().returned:
            is_cancelled = await self._run_own(batch, is_cancelled=False)
        now = self._clock.wall()
        if is_cancelled:
            await self._move(id, "in_progress", "cancelling", now, final="cancelled")
        else:
            await self._executor.run(self._store.end_pending, id, "expired")
            late = (await self._executor.run(self._store.outcome_counts, id)).get("expired")
            await self._move(id, "in_progress", "finalizing", now, final="expired" if late else "completed")

    async def _run_providers(self, batch: Batch, *, is_cancelled: bool) -> ProviderRun:
        """Wait for the items that providers execute."""
        run = self._provider_runs[batch.id] = ProviderRun(self._providers, batch, self._recorder)
        if is_cancelled:
            run.cancel()
        try:
            await run.run()
        finally:
            del self._provider_runs[batch.id]
        return run

    async def _run_own(self, batch: Batch, *, is_cancelled: bool) -> bool:
        """Run the items that no provider executes; whether the batch was cancelled."""
        id = batch.id
        run = self._make_run(batch)
        if is_cancelled:
            run.cancel()
        self._runs[id], self._tenants[id] = run, batch.tenant
        self._share_out()
        try:
            await run.run()
        finally:
            del self._runs[id], self._tenants[id]
            self._share_out()
        return run.is_cancelled

    def _make_run(self, batch: Batch) -> BatchRun | QueuedBatchRun:
        read_page = partial(self._read_page, batch.id)
        if self._queue is None:
            share = partial(self._share, batch.id)
            return BatchRun(batch, read_page, self._execute, self._recorder, self._clock, share)
        has_pending, is_in_progress = partial(self._has_pending, batch.id), partial(self._is_in_progress, batch.id)
        return QueuedBatchRun(batch, read_page, has_pending, is_in_progress, self._queue, self._clock)

    async def _has_pending(self, id: str) -> bool:
        return bool(await self._executor.run(self._store.pending, id, 0, 1, 0))

    async def _is_in_progress(self, id: str) -> bool:
        batch = await self._executor.run(self._store.load, id)
        return batch is not None and batch.status == "in_progress"

    async def _read_page(self, id: str, after: int) -> list[BatchItem]:
        return await self._executor.run(self._store.pending, id, after, PAGE_ITEMS, PAGE_BYTES)

    async def _move(self, id: str, current: str, status: str, now: float, **changes: Any) -> None:
        """Change the status, unless a cancellation came first."""
        await self._executor.run(self._store.move, id, (current,), status, now, **changes)

    def _share(self, id: str) -> int:
        """How many items of a batch may be in flight: tenants share equally, and so do the batches of a tenant."""
        batches = Counter(self._tenants.values())
        return max(1, self._files.limits.batch_concurrency // len(batches) // batches[self._tenants[id]])

    def _share_out(self) -> None:
        for run in self._runs.values():
            run.share_changed()
