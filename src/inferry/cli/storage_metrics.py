"""Metrics of stored work and content: batches, async jobs, callbacks, bytes."""

from collections.abc import Iterable, Mapping

from inferry.cli.storage_wiring import Storage
from inferry.dispatch.periodic_task import PeriodicTask
from inferry.domain.storage import StorageStatistics
from inferry.observe.metrics import Metrics

INTERVAL_S = 30.0
_ENDS = ("completed", "failed", "cancelled", "expired")
_ATTEMPTS = {"delivered": "delivered", "pending": "retried", "failed": "failed"}


class StorageMetrics:
    """Owns the task that reads the database, every INTERVAL_S seconds in the thread of the stores."""

    def __init__(self, storage: Storage, metrics: Metrics) -> None:
        self._storage = storage
        self._found: StorageStatistics | None = None
        self._polling = PeriodicTask(self.poll, INTERVAL_S, "the storage")
        work = storage.async_work
        if storage.queued is not None:
            storage.queued.watch(metrics)
        metrics.watch(
            {
                "inferry_batches_open": lambda: self._stored("open_batches"),
                "inferry_batches_ended_total": lambda: _with_zeros(storage.runner.ended, _ENDS),
                "inferry_async_jobs_open": lambda: self._stored("open_async_jobs"),
                "inferry_async_jobs_ended_total": lambda: _with_zeros(work.runner.ended, _ENDS),
                "inferry_callbacks_open": lambda: self._stored("open_callbacks"),
                "inferry_callback_attempts_total": lambda: {
                    result: work.deliverer.attempts[state] for state, result in _ATTEMPTS.items()
                },
                "inferry_storage_bytes": lambda: self._stored(
                    "file_bytes", "batch_bytes", "async_job_bytes", kinds=("files", "batches", "async_jobs")
                ),
                "inferry_database_bytes": lambda: self._stored("database_bytes"),
            }
        )

    def start(self) -> None:
        self._polling.start()

    async def close(self) -> None:
        await self._polling.close()

    def _stored(self, *names: str, kinds: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
        """Figures of the database by kind; none before it was first read."""
        if self._found is None:
            return {}
        labels: list[tuple[str, ...]] = [(kind,) for kind in kinds] or [()]
        return {label: getattr(self._found, name) for label, name in zip(labels, names, strict=True)}

    async def poll(self) -> None:
        self._found = await self._storage.executor.run(self._storage.statistics.read)


def _with_zeros(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys(names, 0) | dict(counts)
