"""Batched functions: what `@inferry.batched` makes of a function."""

import asyncio
import concurrent.futures
import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from inferry.pipelines.batched.loop_runner import LoopRunner, start_loop_thread
from inferry.pipelines.batched.options import LaneName, Options
from inferry.pipelines.batched.outcomes import OnError
from inferry.pipelines.batched.thread_runner import ThreadRunner

T = TypeVar("T")
R = TypeVar("R")


class BatchedFunction(ABC, Generic[T, R]):
    """Methods that batched functions of both kinds have."""

    def __init__(self, function: Callable[[list[T]], Any], name: str, options: Options) -> None:
        self._name = name
        self._options = options
        functools.update_wrapper(cast(Callable[..., Any], self), function)

    @abstractmethod
    def submit(self, item: T, *, lane: LaneName | None = None) -> "concurrent.futures.Future[R]":
        """Queue an item from any thread. `cancel()` of the future removes an item that has not started."""

    @abstractmethod
    async def acall(self, item: T, *, lane: LaneName | None = None) -> R:
        """The result of one item, on an event loop. Cancelling the caller removes an item that has not started."""

    @abstractmethod
    def close(self) -> None:
        """Refuse further items and return when all that wait or run have ended. Blocks."""

    @abstractmethod
    async def aclose(self) -> None:
        """As `close`, on an event loop."""

    def call(self, item: T, *, lane: LaneName | None = None) -> R:
        """The result of one item. Blocks the thread, so it is not for the thread of an event loop."""
        return self.submit(item, lane=lane).result()

    @property
    @abstractmethod
    def function(self) -> Callable[[list[T]], Any]:
        """The function itself, for a caller that has the whole list."""

    @property
    def on_error(self) -> OnError:
        return self._options.on_error

    def __repr__(self) -> str:
        return f"<batched function {self._name}>"


class SyncBatched(BatchedFunction[T, R]):
    """A batched synchronous function. It runs on threads of its own; all its callers share its batches."""

    def __init__(self, function: Callable[[list[T]], Sequence[R | Exception]], name: str, options: Options) -> None:
        super().__init__(function, name, options)
        self._function = function
        self._runner = ThreadRunner(function, name, options)

    @property
    def function(self) -> Callable[[list[T]], Sequence[R | Exception]]:
        return self._function

    def __call__(self, item: T, *, lane: LaneName | None = None) -> R:
        return self.call(item, lane=lane)

    def submit(self, item: T, *, lane: LaneName | None = None) -> "concurrent.futures.Future[R]":
        result: concurrent.futures.Future[R] = concurrent.futures.Future()
        self._runner.submit(item, self._options.lane_of(lane), result)
        return result

    async def acall(self, item: T, *, lane: LaneName | None = None) -> R:
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._runner.submit(item, self._options.lane_of(lane), result)
        return await result

    def close(self) -> None:
        self._runner.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self._runner.close)


class AsyncBatched(BatchedFunction[T, R]):
    """A batched asynchronous function. Calls on one event loop share batches, which run on that loop.

    Calls from threads (`call`, `submit`) share batches that run on a loop of the function's own, on its own thread.
    """

    def __init__(
        self, function: Callable[[list[T]], Awaitable[Sequence[R | Exception]]], name: str, options: Options
    ) -> None:
        super().__init__(function, name, options)
        self._function = function
        self._lock = threading.Lock()
        self._runners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopRunner] = weakref.WeakKeyDictionary()
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._stop_own_loop: Callable[[], object] | None = None
        self._is_closed = False

    @property
    def function(self) -> Callable[[list[T]], Awaitable[Sequence[R | Exception]]]:
        return self._function

    async def __call__(self, item: T, *, lane: LaneName | None = None) -> R:
        return await self.acall(item, lane=lane)

    async def acall(self, item: T, *, lane: LaneName | None = None) -> R:
        loop = asyncio.get_running_loop()
        runner = self._runners.get(loop) or self._runner(loop)
        result: asyncio.Future[R] = loop.create_future()
        runner.submit(item, self._options.lane_of(lane), result)
        return await result

    def submit(self, item: T, *, lane: LaneName | None = None) -> "concurrent.futures.Future[R]":
        wanted_lane = self._options.lane_of(lane)
        loop = self._own_loop or self._start_own_loop()
        runner = self._runner(loop)
        result: concurrent.futures.Future[R] = concurrent.futures.Future()
        loop.call_soon_threadsafe(runner.submit_from_thread, item, wanted_lane, result)
        return result

    def close(self) -> None:
        for drained in self._drain():
            drained.result()
        if self._stop_own_loop is not None:
            self._stop_own_loop()

    async def aclose(self) -> None:
        for drained in self._drain():
            await asyncio.wrap_future(drained)
        if self._stop_own_loop is not None:
            self._stop_own_loop()

    def _drain(self) -> "list[concurrent.futures.Future[None]]":
        """Have every loop that still runs drain its batches."""
        with self._lock:
            self._is_closed = True
            runners = [(loop, runner) for loop, runner in self._runners.items() if loop.is_running()]
        return [asyncio.run_coroutine_threadsafe(runner.drain(), loop) for loop, runner in runners]

    def _start_own_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._own_loop is None:
                loop = self._own_loop = start_loop_thread(self._name)
                # The loop's thread also ends with the last reference to this function.
                self._stop_own_loop = weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
            return self._own_loop

    def _runner(self, loop: asyncio.AbstractEventLoop) -> LoopRunner:
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed")
            if loop not in self._runners:
                self._runners[loop] = LoopRunner(self._function, self._name, self._options)
            return self._runners[loop]
