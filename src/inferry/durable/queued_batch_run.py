"""The items of one batch that run from the work queue, at any gateway or pull-worker.

Belongs to one event loop, that of the gateway which takes batches to their end. Items without an outcome are queued,
and queued again from time to time, which has no effect on items that are in the queue.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from inferry.domain.clock import Clock
from inferry.domain.storage import Batch, BatchItem, item_id
from inferry.domain.work_queue import NewWork, QueueUnavailable, WorkQueue
from inferry.durable.queued_jobs import SWEEP_S, SWEEP_SHARE
from inferry.durable.stored_work import BATCH_LANE, model_in

POLL_S = 1.0


class QueuedBatchRun:
    """Takes the place of `BatchRun`. `read_page` is as there. `has_pending`: whether an item has no outcome.
    `is_in_progress`: whether the batch is.
    """

    def __init__(
        self,
        batch: Batch,
        read_page: Callable[[int], Awaitable[Sequence[BatchItem]]],
        has_pending: Callable[[], Awaitable[bool]],
        is_in_progress: Callable[[], Awaitable[bool]],
        queue: WorkQueue,
        clock: Clock,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._batch = batch
        self._read_page = read_page
        self._has_pending = has_pending
        self._is_in_progress = is_in_progress
        self._queue = queue
        self._clock = clock
        self._poll_s = poll_s
        self._wake = asyncio.Event()
        self.is_cancelled = False

    def cancel(self) -> None:
        """Queue no further item. Holders of items find out when they renew."""
        self.is_cancelled = True
        self._wake.set()

    def share_changed(self) -> None:
        """The queue has its own shares."""

    async def run(self) -> None:
        """Return when every item has an outcome, at the deadline, or after `cancel`. Items may be in flight then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._batch.deadline - self._clock.wall())):
                await self._run_items()

    async def _run_items(self) -> None:
        loop = asyncio.get_running_loop()
        sweep_at = loop.time()
        while not self.is_cancelled:
            began = loop.time()
            if began >= sweep_at:
                with suppress(QueueUnavailable):
                    await self._add_all()
                sweep_at = loop.time() + max(SWEEP_S, (loop.time() - began) / SWEEP_SHARE)
            if not await self._has_pending():
                return
            if not await self._is_in_progress():
                self.is_cancelled = True
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()

    async def _add_all(self) -> None:
        batch, last = self._batch, 0
        while not self.is_cancelled and (page := await self._read_page(last)):
            last = page[-1].number
            await self._queue.add(
                [NewWork(item_id(batch.id, one.number), BATCH_LANE, model_in(one.body), batch.tenant) for one in page]
            )
