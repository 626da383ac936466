"""Threads for functions of the configuration: a slow one never keeps the gateway's own work waiting."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 32
_pool = ThreadPoolExecutor(MAX_THREADS, "inferry-function")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's result. A cancelled caller does not stop a function that has begun."""
    return await asyncio.get_running_loop().run_in_executor(_pool, partial(function, *args, **kwargs))
