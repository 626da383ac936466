"""Runs a synchronous function on threads of its own, for callers on any thread and any event loop.

The lock guards the queue and the counts. Threads start with the first item, at most `concurrency` of them, and end
after `IDLE_S` without an item, so that a function that is no longer called holds nothing.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from inferry.domain.lanes import Lane
from inferry.pipelines.batched.batch_queue import AnyFuture, Entry
from inferry.pipelines.batched.options import Options
from inferry.pipelines.batched.outcomes import call_all

IDLE_S = 10.0


class ThreadRunner:
    def __init__(self, function: Callable[[list[Any]], Sequence[Any]], name: str, options: Options) -> None:
        self._function = function
        self._name = name
        self._options = options
        self._changed = threading.Condition(threading.Lock())
        self._queue = options.make_queue()
        self._threads = 0
        self._busy = 0
        self._is_closed = False

    def submit(self, item: Any, lane: Lane, result: AnyFuture) -> None:
        """Queue an item. Raises `QueueFull`, or RuntimeError once closed."""
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed")
            queue, concurrency = self._queue, self._options.concurrency
            queue.offer(Entry(item, result), lane, time.monotonic(), self._busy < concurrency)
            if queue.size == 1 or queue.is_full_batch:
                self._changed.notify()
            free = self._threads - self._busy
            if self._threads < concurrency and free * self._options.max_batch < queue.size:
                self._threads += 1
                # A daemon: an item that runs when the interpreter exits must not keep it alive.
                threading.Thread(target=self._serve, name=f"batched {self._name}", daemon=True).start()

    def close(self) -> None:
        """Refuse further items, run those that wait, and return when all have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            while self._threads:
                self._changed.wait()

    def _serve(self) -> None:
        while batch := self._next_batch():
            started_at = time.monotonic()
            items = [entry.item for entry in batch]
            try:
                outcomes = call_all(self._function, self._name, items, self._options.on_error)
            except BaseException as error:  # such as SystemExit: it belongs to the callers, not to this thread
                outcomes = [error] * len(batch)
            _deliver(batch, outcomes)
            with self._changed:
                self._busy -= 1
                self._queue.record_pass(time.monotonic() - started_at)

    def _next_batch(self) -> list[Entry]:
        """Wait for a batch. Empty once the thread ends."""
        with self._changed:
            while True:
                at = self._queue.release_at()
                if at is None:
                    if self._is_closed or (not self._changed.wait(IDLE_S) and self._queue.release_at() is None):
                        self._threads -= 1
                        self._changed.notify_all()
                        return []
                elif self._is_closed or at <= (now := time.monotonic()):
                    batch = self._queue.take()
                    if batch:
                        self._busy += 1
                        return batch
                else:
                    self._changed.wait(at - now)


def settle(result: AnyFuture, outcome: Any | BaseException) -> None:
    """Give a caller its result or its error. A caller that was cancelled meanwhile gets nothing."""
    if result.done():
        return
    if not isinstance(outcome, BaseException):
        result.set_result(outcome)
    elif isinstance(outcome, StopIteration):
        result.set_exception(RuntimeError("the function raised StopIteration"))  # a future refuses StopIteration
    else:
        result.set_exception(outcome)


def _deliver(batch: list[Entry], outcomes: Sequence[Any | BaseException]) -> None:
    """Settle all results, with one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[AnyFuture, Any]]] = {}
    for entry, outcome in zip(batch, outcomes, strict=True):
        if isinstance(entry.result, asyncio.Future):
            by_loop.setdefault(entry.result.get_loop(), []).append((entry.result, outcome))
        else:
            settle(entry.result, outcome)
    for loop, settled in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its callers are gone
            loop.call_soon_threadsafe(_settle_all, settled)


def _settle_all(settled: list[tuple[AnyFuture, Any]]) -> None:
    for result, outcome in settled:
        settle(result, outcome)
