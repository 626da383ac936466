"""Makes what runs stored work from the queue that gateways share. Part of the composition root."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from inferry.domain.clock import Clock
from inferry.domain.lanes import Lane
from inferry.domain.storage import StorageLimits
from inferry.domain.work_queue import WorkQueue
from inferry.durable.async_jobs import JobRunner
from inferry.durable.dead_letters import DeadLetters
from inferry.durable.documents import Documents
from inferry.durable.execute import Execute
from inferry.durable.executor import StoreExecutor
from inferry.durable.queued_jobs import QueuedJobs
from inferry.durable.work_runner import WorkRunner
from inferry.durable.work_source import DatabaseWork
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.batches import BatchStore
from inferry.observe.metrics import Metrics


class SharedQueue(NamedTuple):
    """The queue of all gateways. `consumer` names this one. Work of `pull_models` is for pull-workers, unless a worker
    of this gateway serves the model too.
    """

    queue: WorkQueue
    consumer: str
    pull_models: Sequence[str]
    serves: Callable[[str], bool]

    def skipped(self) -> Sequence[str]:
        return [model for model in self.pull_models if not self.serves(model)]


class QueuedWork:
    """Stored work of the queue at one gateway: what runs it, and where it is kept."""

    def __init__(
        self,
        shared: SharedQueue,
        batches: BatchStore,
        executor: StoreExecutor,
        execute: Execute,
        limits: StorageLimits,
        clock: Clock,
        documents: Documents,
        write_ledger: Callable[[], object],
    ) -> None:
        self._shared = shared
        self._batches = batches
        self._executor = executor
        self._execute = execute
        self._limits = limits
        self._clock = clock
        self._write_ledger = write_ledger
        self.dead_letters = DeadLetters(documents)
        self.work: DatabaseWork
        self.runner: WorkRunner

    def make_jobs(self, store: AsyncJobStore, on_end: Callable[[], None]) -> JobRunner:
        """What queues async jobs. Called once."""
        shared, limits = self._shared, self._limits
        self.work = DatabaseWork(
            store,
            self._batches,
            self._executor,
            self._clock,
            self.dead_letters,
            write_ledger=self._write_ledger,
            ttl_s=limits.job_ttl_s,
            on_end=on_end,
        )
        more = {Lane.P2.name: limits.batch_concurrency}
        self.runner = WorkRunner(
            shared.queue,
            self.work,
            self._execute,
            self._clock,
            consumer=shared.consumer,
            lanes={lane.name: limits.job_concurrency + more.get(lane.name, 0) for lane in Lane},
            skipped=shared.skipped,
            give_up=self.work.give_up,
        )
        return QueuedJobs(store, self._executor, shared.queue, self.work, self.runner, self._clock, on_end=on_end)

    def watch(self, metrics: Metrics) -> None:
        runner, queue = self.runner, self._shared.queue
        results = ("taken", "claimed", "done", "lost", "put_back", "dead")
        metrics.watch(
            {
                "inferry_work_queue_depth": lambda: runner.renewal.depth,
                "inferry_pull_workers": lambda: runner.renewal.pull_workers,
                "inferry_work_in_flight": lambda: runner.in_flight,
                "inferry_work_queue_errors_total": lambda: queue.failures,
                "inferry_work_deliveries_total": lambda: {one: runner.deliveries[one] for one in results},
            }
        )

    async def close(self) -> None:
        """What this gateway holds is put back for the others."""
        await self.runner.close()
        await self.work.close()
