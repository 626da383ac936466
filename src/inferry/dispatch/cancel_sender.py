"""Cancels on their way to workers, and what the workers confirm.

Belongs to the dispatch loop. Cancels that are asked for in one burst of callbacks travel to a worker in one call; the
result of that call is what the worker confirms to hold nothing any more.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from inferry.domain.ports import Worker

log = logging.getLogger(__name__)

Confirmation = asyncio.Future[frozenset[str]]


class _Batch:
    """One call to one worker. `confirmed` has the jobs that the worker confirmed; it never fails."""

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
        self._batch_by_job: dict[str, _Batch] = {}

    def send(self, worker: str, job_id: str) -> Confirmation:
        """Have the worker end the job, together with the others that are asked for now; what it will have confirmed."""
        batch = self._pending.get(worker)
        if batch is None:
            batch = self._pending[worker] = _Batch(worker)
            self._spawn(self._deliver(batch))
        batch.job_ids.append(job_id)
        self._batch_by_job[job_id] = batch
        return batch.confirmed

    def confirmation(self, job_id: str) -> Confirmation | None:
        """What the latest cancel of the job comes to; None where none is on its way."""
        batch = self._batch_by_job.get(job_id)
        return None if batch is None else batch.confirmed

    async def _deliver(self, batch: _Batch) -> None:
        # A worker knows nothing of a job before its plan has begun to run. All plans that exist by now begin before
        # this goes on.
        del self._pending[batch.worker]
        await asyncio.sleep(0)
        confirmed: frozenset[str] = frozenset()
        try:
            worker = self._find_worker(batch.worker)
            if worker is not None:
                confirmed = frozenset(await worker.cancel(batch.job_ids))
        except Exception:
            log.exception("worker %s could not cancel %d jobs", batch.worker, len(batch.job_ids))
        finally:
            batch.confirmed.set_result(confirmed)
            for job_id in batch.job_ids:
                if self._batch_by_job.get(job_id) is batch:
                    del self._batch_by_job[job_id]
