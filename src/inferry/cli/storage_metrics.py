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
        self._found = StorageStatistics()
        self._polling = PeriodicTask(self.poll, INTERVAL_S, "the storage")
        work = storage.async_work
        metrics.watch(
            {
                "inferry_batches_open": lambda: self._found.open_batches,
                "inferry_batches_ended_total": lambda: _with_zeros(storage.runner.ended, _ENDS),
                "inferry_async_jobs_open": lambda: self._found.open_async_jobs,
                "inferry_async_jobs_ended_total": lambda: _with_zeros(work.runner.ended, _ENDS),
                "inferry_callbacks_open": lambda: self._found.open_callbacks,
                "inferry_callback_attempts_total": lambda: {
                    result: work.deliverer.attempts[state] for state, result in _ATTEMPTS.items()
                },
                "inferry_storage_bytes": lambda: {
                    "files": self._found.file_bytes,
                    "batches": self._found.batch_bytes,
                    "async_jobs": self._found.async_job_bytes,
                },
                "inferry_database_bytes": lambda: self._found.database_bytes,
            }
        )

    def start(self) -> None:
        self._polling.start()

    async def close(self) -> None:
        await self._polling.close()

    async def poll(self) -> None:
        self._found = await self._storage.executor.run(self._storage.statistics.read)


def _with_zeros(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys(names, 0) | dict(counts)
