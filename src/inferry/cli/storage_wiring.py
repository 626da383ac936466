"""Makes what stores content and works on it. Part of the composition root."""

from functools import partial
from typing import NamedTuple

from inferry.cli.config.callbacks import CallbacksConfig
from inferry.cli.job_wiring import AsyncWork, make_async_work
from inferry.cli.provider_wiring import MakeProviders
from inferry.cli.queue_wiring import QueuedWork, SharedQueue
from inferry.domain.clock import Clock
from inferry.domain.ledger import RetentionPolicy
from inferry.domain.storage import StorageLimits
from inferry.durable.background import BackgroundResponses
from inferry.durable.background_claims import BackgroundClaims
from inferry.durable.batch_runner import BatchRunner
from inferry.durable.batches import Batches
from inferry.durable.documents import Documents
from inferry.durable.execute import Execute
from inferry.durable.executor import StoreExecutor
from inferry.durable.files import Files
from inferry.durable.provider_run import Providers
from inferry.durable.responses import StoredResponses
from inferry.durable.sweeper import Sweep, Sweeper
from inferry.durable.tenant_data import TenantData
from inferry.ledger.recorder import Recorder
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.batches import BatchStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.documents import DocumentStore
from inferry.ledger.stores.files import FileStore
from inferry.ledger.stores.retention import RetentionStore
from inferry.ledger.stores.storage_statistics import StorageStatisticsStore


class Storage(NamedTuple):
    """Stored content, and the work that is stored."""

    limits: StorageLimits
    database: LedgerDatabase
    executor: StoreExecutor
    documents: Documents
    files: Files
    batches: Batches
    runner: BatchRunner
    responses: StoredResponses
    background: BackgroundResponses
    async_work: AsyncWork
    tenant_data: TenantData
    sweeper: Sweeper
    statistics: StorageStatisticsStore
    providers: Providers
    queued: QueuedWork | None = None

    def start(self) -> None:
        self.sweeper.start()
        if self.limits.store == "always":
            self.runner.start()
            self.background.start()
            self.async_work.start()

    def start_queue(self) -> None:
        """Run work of the queue that gateways share, whichever of them owns the workers."""
        if self.queued is not None and self.limits.store == "always":
            self.queued.runner.start()

    async def poll(self) -> None:
        """Run batches and async jobs that other gateways have accepted, and background responses that they left."""
        if self.limits.store == "always":
            await self.runner.poll()
            await self.async_work.runner.poll()
            await self.background.poll()

    async def stop(self) -> None:
        """Stop stored work, which another gateway continues. It may be started again.

        Background responses continue: each is a call of this gateway, whichever gateway owns the workers.
        """
        await self.runner.close()
        await self.async_work.stop()
        await self.sweeper.close()

    async def close(self) -> None:
        if self.queued is not None:
            await self.queued.close()
        await self.stop()
        await self.background.close()
        self.providers.close()
        await self.async_work.close()
        await self.executor.close()
        self.database.close()


LEDGER_TIMEOUT_S = 5.0
"""Longest wait for the ledger's rows before results are written without them."""


def make_storage(
    ledger: str,
    limits: StorageLimits,
    retention: RetentionPolicy,
    callbacks: CallbacksConfig,
    clock: Clock,
    execute: Execute,
    recorder: Recorder,
    make_providers: MakeProviders,
    *,
    max_line_bytes: int,
    shared_queue: SharedQueue | None = None,
) -> Storage:
    """The stored content in the ledger's database. Nothing is started. `execute` runs stored work."""
    database, executor = LedgerDatabase(ledger), StoreExecutor()
    document_store, file_store, batch_store = DocumentStore(database), FileStore(database), BatchStore(database)
    if shared_queue is None:  # else an upload may be another gateway's
        file_store.discard_uploads()
    files = Files(file_store, executor, limits, clock)
    write_ledger = partial(recorder.flush, LEDGER_TIMEOUT_S)
    providers = make_providers(database, executor)
    runner = BatchRunner(
        batch_store,
        files,
        executor,
        execute,
        clock,
        max_line_bytes=max_line_bytes,
        write_ledger=write_ledger,
        providers=providers,
        queue=None if shared_queue is None else shared_queue.queue,
    )
    documents = Documents(document_store, executor, clock, limits.max_bytes_per_tenant)
    queued = None
    if shared_queue is not None:
        queued = QueuedWork(shared_queue, batch_store, executor, execute, limits, clock, documents, write_ledger)
    async_work = make_async_work(database, executor, limits, callbacks, clock, execute, write_ledger, queued)
    responses = StoredResponses(documents, limits)
    claims = None if shared_queue is None else BackgroundClaims(documents, shared_queue.consumer)
    write_rows = partial(executor.run, write_ledger)
    background = BackgroundResponses(responses, documents, execute, clock.wall, write_ledger=write_rows, claims=claims)
    stores, runners = (document_store, file_store, batch_store, async_work.store), (runner, async_work.runner)
    return Storage(
        limits,
        database,
        executor,
        documents,
        files,
        Batches(batch_store, files, executor, runner, execute, clock),
        runner,
        responses,
        background,
        async_work,
        TenantData(*stores, executor, *runners, background),
        Sweeper(_sweeps(*stores, RetentionStore(database, retention)), executor, clock),
        StorageStatisticsStore(database),
        providers,
        queued,
    )


def _sweeps(
    documents: DocumentStore, files: FileStore, batches: BatchStore, jobs: AsyncJobStore, ledger: RetentionStore
) -> dict[str, Sweep]:
    """What the sweeper deletes, by the name that its log has."""
    return {
        "documents": documents.sweep,
        "files": files.sweep,
        "batches": batches.sweep,
        "jobs": jobs.sweep,
        "the ledger": ledger.sweep,
    }
