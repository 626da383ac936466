"""One batch from its first item to its last: a bounded number in flight, read from the database as they are needed.

Belongs to one event loop. The database is the truth: a run that is cut off at any point is run again, and continues
with the items that have no outcome.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from inferry.domain.clock import Clock
from inferry.domain.errors import RunCancelled
from inferry.domain.storage import Batch, BatchItem, ItemResult, ItemTry, item_id
from inferry.durable.batch_lines import result_of
from inferry.durable.execute import Execute, StoredCall
from inferry.durable.retries import call_once, is_refusal, retry_delay_s
from inferry.durable.window import Window


class Results(Protocol):
    """Where results go. A record is stored when `record` returns."""

    async def record(self, record: ItemResult | ItemTry) -> None: ...
    async def flush(self) -> None: ...


class BatchRun:
    """Runs the items of one batch.

    `read_page(after)` gives the next items without an outcome behind the one with that number; an empty page is the
    last. `share` says how many may be in flight now.
    """

    def __init__(
        self,
        batch: Batch,
        read_page: Callable[[int], Awaitable[Sequence[BatchItem]]],
        execute: Execute,
        recorder: Results,
        clock: Clock,
        share: Callable[[], int],
    ) -> None:
        self._batch = batch
        self._next_page = read_page
        self._execute = execute
        self._recorder = recorder
        self._clock = clock
        self._share = share
        self._tasks: set[asyncio.Task[None]] = set()
        self._page: deque[BatchItem] = deque()
        self._window = Window()
        self._last = 0
        self._has_more = True
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        self.is_cancelled = False

    def cancel(self) -> None:
        """Stop the items in flight and begin no other."""
        self.is_cancelled = True
        self._wake.set()

    def share_changed(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Return when every item has an outcome, at the deadline, or after `cancel`; no item is in flight then.

        Raises what an item raised that is no answer.
        """
        try:
            async with asyncio.timeout(max(0.0, self._batch.deadline - self._clock.wall())):
                await self._run_items()
        except TimeoutError:
            pass
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._recorder.flush()

    async def _run_items(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.is_cancelled:
            if self._failure is not None:
                raise self._failure
            self._wake.clear()
            if not self._page and self._has_more:
                await self._read_page()
            now = loop.time()
            if self._page and self._window.allows(len(self._tasks), self._share(), now):
                task = loop.create_task(self._run_item(self._page.popleft()))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            elif self._page or self._tasks:
                await self._wait_until(self._window.not_before if self._window.not_before > now else None)
            else:
                return

    async def _wait_until(self, time: float | None) -> None:
        """Wait for news, or for a time. The timer may fire early; the caller reads the clock again."""
        try:
            async with asyncio.timeout_at(time):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _read_page(self) -> None:
        page = await self._next_page(self._last)
        self._has_more = bool(page)
        if page:
            self._last = page[-1].number
            self._page.extend(page)

    async def _run_item(self, item: BatchItem) -> None:
        batch = self._batch
        call = StoredCall(
            tenant=batch.tenant,
            key_id=batch.key_id,
            path=batch.endpoint,
            body=item.body,
            job_id=item_id(batch.id, item.number),
            run_id=batch.id,
            step_id=f"item-{item.number}",
        )

        failures, tries = 0, item.tries
        while True:
            answer = await call_once(self._execute, call, tries)
            failures += not is_refusal(answer)
            delay_s = retry_delay_s(answer, failures)
            if delay_s is None:
                break
            if not item.is_charged:  # else every further try has the job id that was charged
                tries += 1
                await self._recorder.record(ItemTry(batch.id, item.number, tries))
            if is_refusal(answer):
                self._put_back(replace(item, tries=tries), delay_s)
                return
            await asyncio.sleep(delay_s)
        if answer.code == RunCancelled.code:
            self.cancel()  # the batch is a run, and the run was cancelled
            return
        await self._recorder.record(result_of(batch, item, answer))
        self._window.answered()

    def _put_back(self, item: BatchItem, delay_s: float) -> None:
        """Begin the item again when the refusal says, or when a place becomes free."""
        self._page.appendleft(item)
        self._window.refused(len(self._tasks) - 1, asyncio.get_running_loop().time() + delay_s)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error  # the item has no outcome and runs again with the batch
        self._wake.set()
