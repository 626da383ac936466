"""Runs operations on stores off the event loop.

One thread: operations run one at a time, in the order in which they were asked for, as the one connection demands.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class StoreExecutor:
    """Belongs to the event loop that calls it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "inferry-storage")

    async def run(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The operation's result. A cancelled caller does not stop an operation that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(operation, *args, **kwargs))

    async def close(self) -> None:
        """Wait for the operations asked for."""
        await asyncio.to_thread(self._pool.shutdown)
