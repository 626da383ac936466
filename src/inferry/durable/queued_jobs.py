"""Async jobs that run from the work queue, at any gateway or pull-worker.

Belongs to one event loop. A gateway queues the jobs that it accepts. The gateway that runs stored work also sweeps:
it queues all unfinished jobs again from time to time, which has no effect on jobs that are in the queue, and ends those
that are past their deadline. Jobs that the queue lost, or never got, are found this way.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from inferry.domain.async_jobs import AsyncJob, AsyncJobStatus, JobEnd
from inferry.domain.clock import Clock
from inferry.domain.work_queue import NewWork, QueueUnavailable, WorkQueue
from inferry.durable.executor import StoreExecutor
from inferry.durable.work_runner import WorkRunner
from inferry.durable.work_source import DatabaseWork

log = logging.getLogger(__name__)

SWEEP_S = 10.0
SWEEP_SHARE = 0.1
"""Greatest share of the time that is spent on sweeping. With many unfinished jobs sweeps are further apart."""
PAGE = 500
MAX_ADDING = 10_000
"""Jobs that wait for the answer of the queue. Further ones wait for a sweep, in the database."""
RETRY_S = 0.5
"""Until work is added again to a queue that did not answer."""
WAKE_S = 1.0
"""Interval at which callbacks are looked for, of jobs that other gateways have ended."""


class SweptStore(Protocol):
    """Where jobs are kept. Its methods block."""

    def unfinished_page(self, after: tuple[str, str], limit: int) -> list[AsyncJob]: ...
    def end(self, end: JobEnd) -> bool: ...


class QueuedJobs:
    """Takes the place of `AsyncJobRunner` where gateways share a queue. `on_end`: a callback may be due."""

    def __init__(
        self,
        store: SweptStore,
        executor: StoreExecutor,
        queue: WorkQueue,
        work: DatabaseWork,
        runner: WorkRunner,
        clock: Clock,
        *,
        on_end: Callable[[], None],
        sweep_s: float = SWEEP_S,
    ) -> None:
        self._store = store
        self._executor = executor
        self._queue = queue
        self._work = work
        self._runner = runner
        self._clock = clock
        self._on_end = on_end
        self._sweep_s = sweep_s
        self._new: list[NewWork] = []
        self._is_closing = False
        self._adding: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeping: list[asyncio.Task[None]] = []

    @property
    def ended(self) -> Counter[str]:
        """Jobs that this process ended, by status."""
        return self._work.ended_jobs

    def start(self) -> None:
        """Sweep from now on."""
        self._sweeping = [self._spawn(self._sweep_again()), self._spawn(self._wake_again())]

    async def close(self) -> None:
        """End the sweeps. Jobs may be added after that: a gateway that no longer sweeps accepts them too."""
        self._is_closing = True
        for task in self._sweeping:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._is_closing = False

    async def poll(self) -> None:
        """Jobs of other gateways are in the queue."""

    def add(self, job: AsyncJob) -> None:
        """Queue a job that is in the database, once the queue answers. If this process ends before, a sweep adds it."""
        if len(self._new) >= MAX_ADDING:
            return
        self._new.append(_new_work(job))
        if self._adding is None:
            self._adding = self._spawn(self._add_all())

    def stop(self, id: str) -> None:
        """Stop a job that has ended in the database, or that was deleted. Other holders find out when they renew."""
        self._runner.stop_work(id)
        self._on_end()

    def end_of(self, id: str, status: AsyncJobStatus) -> JobEnd:
        return self._work.end_of(id, status)

    async def sweep(self) -> None:
        """Queue all unfinished jobs that are not in the queue, and end those that are too late."""
        last, added = ("", ""), 0
        while page := await self._executor.run(self._store.unfinished_page, last, PAGE):
            last = page[-1].tenant, page[-1].id
            now = self._clock.wall()
            for job in page:
                if job.deadline <= now and await self._executor.run(self._store.end, self.end_of(job.id, "expired")):
                    self.ended["expired"] += 1
                    self.stop(job.id)
            added += await self._queue.add([_new_work(job) for job in page if job.deadline > now])
        if added:
            log.info("queued %d unfinished jobs that were not in the queue", added)

    async def _sweep_again(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self.sweep()
            except QueueUnavailable:
                pass
            except Exception as error:
                log.error("unfinished jobs could not be swept: %s", type(error).__name__)
            await asyncio.sleep(max(self._sweep_s, (loop.time() - began) / SWEEP_SHARE))

    async def _wake_again(self) -> None:
        while True:
            await asyncio.sleep(WAKE_S)
            self._on_end()

    async def _add_all(self) -> None:
        """Several at a time: what is added during a request goes into the next."""
        try:
            while self._new:
                work, self._new = self._new, []
                try:
                    await self._queue.add(work)
                except QueueUnavailable:
                    if self._is_closing:
                        return  # a sweep adds them
                    self._new = work + self._new
                    await asyncio.sleep(RETRY_S)
        finally:
            self._adding = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _new_work(job: AsyncJob) -> NewWork:
    return NewWork(job.id, job.lane, job.detail.model, job.tenant)
