"""Runs an asynchronous function on one event loop. Every method is called on that loop, so nothing is locked.

A runner holds no reference to its loop while it is idle: it lives as long as the loop, in a dictionary with weak keys.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from inferry.domain.lanes import Lane
from inferry.pipelines.batched.batch_queue import AnyFuture, Entry
from inferry.pipelines.batched.options import Options
from inferry.pipelines.batched.outcomes import await_all
from inferry.pipelines.batched.thread_runner import settle


class LoopRunner:
    def __init__(self, function: Callable[[list[Any]], Awaitable[Sequence[Any]]], name: str, options: Options) -> None:
        self._function = function
        self._name = name
        self._options = options
        self._queue = options.make_queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._due_at = 0.0
        self._is_closed = False
        self._drained = asyncio.Event()

    def submit(self, item: Any, lane: Lane, result: AnyFuture) -> None:
        """Queue an item. Raises `QueueFull`, or RuntimeError once closed."""
        if self._is_closed:
            raise RuntimeError(f"{self._name} is closed")
        is_idle = len(self._tasks) < self._options.concurrency
        self._queue.offer(Entry(item, result), lane, asyncio.get_running_loop().time(), is_idle)
        if is_idle:
            self._schedule()

    def submit_from_thread(self, item: Any, lane: Lane, result: AnyFuture) -> None:
        """As `submit`, for a caller on another thread: a refusal is the result."""
        try:
            self.submit(item, lane, result)
        except Exception as error:
            settle(result, error)

    async def drain(self) -> None:
        """Refuse further items, run those that wait, and return when all have ended."""
        self._is_closed = True
        self._release()
        if self._tasks:
            await self._drained.wait()

    def _schedule(self) -> None:
        """Have `_release` called when the next batch is due: after this burst of callbacks at the earliest."""
        at = self._queue.release_at()
        if at is None or (self._timer is not None and self._due_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = at
        loop = asyncio.get_running_loop()
        self._timer = loop.call_soon(self._release) if at <= loop.time() else loop.call_at(at, self._release)

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while len(self._tasks) < self._options.concurrency:
            at = self._queue.release_at()
            if at is None:
                break
            if at > loop.time() and not self._is_closed:
                self._schedule()
                break
            batch = self._queue.take()
            if batch:
                task = loop.create_task(self._run(batch))
                self._tasks.add(task)
                task.add_done_callback(self._on_end)

    async def _run(self, batch: list[Entry]) -> None:
        started_at = time.monotonic()
        try:
            items = [entry.item for entry in batch]
            outcomes = await await_all(self._function, self._name, items, self._options.on_error)
        except asyncio.CancelledError:
            for entry in batch:
                entry.result.cancel()
            raise
        except BaseException as error:  # such as SystemExit, which also ends the loop
            for entry in batch:
                settle(entry.result, error)
            raise
        self._queue.record_pass(time.monotonic() - started_at)
        for entry, outcome in zip(batch, outcomes, strict=True):
            settle(entry.result, outcome)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._release()
        if self._is_closed and not self._tasks:
            self._drained.set()


def start_loop_thread(name: str) -> asyncio.AbstractEventLoop:
    """An event loop on a thread of its own, which ends when the loop is stopped."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    threading.Thread(target=serve, name=f"batched {name}", daemon=True).start()
    return loop
