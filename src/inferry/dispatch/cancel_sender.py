"""Cancels on their way to workers, and what the workers confirm.

Belongs to the dispatch loop. Cancels that are requested in one burst of callbacks travel to a worker in one call; the
result of that call is the set of jobs that the worker confirms to hold nothing for. A caller awaits that result.

A worker knows a job only once the job's plan has begun to run. Tasks begin in the order in which they were spawned, so
a cancel spawned after its plan arrives after it: a batch takes no further job once another plan was sent to its worker.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import NamedTuple

from inferry.domain.ports import Worker

log = logging.getLogger(__name__)

Confirmation = asyncio.Future[frozenset[str]]
"""The jobs that a worker confirmed. It never fails: a worker that fails has confirmed nothing."""


class PendingCancel(NamedTuple):
    """A running job that its worker was told to end. The result holds the job once the worker has confirmed."""

    job_id: str
    confirmed: Confirmation


class _Batch:
    """One call to one worker."""

    __slots__ = ("confirmed", "job_ids", "worker")

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.job_ids: list[str] = []
        self.confirmed: Confirmation = asyncio.get_running_loop().create_future()


class CancelSender:
    """Sends cancels; `find_worker` finds a worker by name, `spawn` owns the tasks."""

    def __init__(
        self, find_worker: Callable[[str], Worker | None], spawn: Callable[[Coroutine[None, None, None]], None]
    ) -> None:
        self._find_worker = find_worker
        self._spawn = spawn
        self._pending: dict[str, _Batch] = {}

    def send(self, worker: str, job_id: str) -> PendingCancel:
        """Have the worker end the job, together with others requested now."""
        batch = self._pending.get(worker)
        if batch is None:
            batch = self._pending[worker] = _Batch(worker)
            self._spawn(self._deliver(batch))
        batch.job_ids.append(job_id)
        return PendingCancel(job_id, batch.confirmed)

    def plan_sent(self, worker: str) -> None:
        """A plan was spawned for the worker: cancels of its jobs need a batch that is spawned later."""
        if self._pending:
            self._pending.pop(worker, None)

    async def _deliver(self, batch: _Batch) -> None:
        if self._pending.get(batch.worker) is batch:
            del self._pending[batch.worker]
        confirmed: frozenset[str] = frozenset()
        try:
            worker = self._find_worker(batch.worker)
            if worker is not None:
                confirmed = frozenset(await worker.cancel(batch.job_ids))
        except Exception:
            log.exception("worker %s could not cancel %d jobs", batch.worker, len(batch.job_ids))
        finally:
            batch.confirmed.set_result(confirmed)
