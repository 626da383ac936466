"""Tasks with an owner: none outlives it, and none is lost to the garbage collector."""

import asyncio
from collections.abc import Coroutine


class TaskSet:
    __slots__ = ("_loop", "_tasks")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Start a task. Tasks begin in the order in which they were spawned."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
