"""An event loop whose clock jumps to the next timer when nothing else is left to do: hours take milliseconds."""

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody waits, and not while one of the loop's own threads is at work.

    Nothing here may wait for another process.
    """

    def __init__(self) -> None:
        self._virtual_now = 1000.0
        self.at_work = 0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._virtual_now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        done = super().run_in_executor(executor, func, *args)
        self.at_work += 1
        done.add_done_callback(self._back)
        return done

    async def shutdown_default_executor(self, *args: Any) -> None:
        self.at_work += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self.at_work -= 1

    def _back(self, done: "asyncio.Future[Any]") -> None:
        self.at_work -= 1

    def jump(self, seconds: float) -> None:
        self._virtual_now += seconds


class CreepingLoop(VirtualTimeLoop):
    """Time passes with every reading, and timers fire up to a millisecond early, as those of uvloop do."""

    _rng = random.Random(1)

    def __init__(self) -> None:
        super().__init__()
        self._clock_resolution = 0.001

    def time(self) -> float:
        super().jump(self._rng.uniform(0.0, 0.0003))
        return super().time()

    def jump(self, seconds: float) -> None:
        super().jump(max(0.0, seconds - 0.0008))


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._loop.at_work:
            return super().select(None if timeout is None or timeout > 0 else 0)
        if timeout is None:
            raise RuntimeError("everybody waits, and for nothing that will come")
        ready = super().select(0)
        if not ready and timeout > 0:
            self._loop.jump(timeout)
        return ready


class LoopClock:
    """The loop's own time, as a Clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    wall = now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
