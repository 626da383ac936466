"""`@inferry.batched`: what an item costs beyond its part of a call of the function with a whole list.

The function does almost nothing, so the difference is the overhead. Direct: calls with lists of `MAX_BATCH` items. Each
other arm has the same items, called one by one by many callers at a time:

- `asyncio`: tasks on one event loop, an asynchronous function;
- `asyncio_gather`: the same with one task per item, all started at once;
- `asyncio_to_thread`: tasks on one event loop, a synchronous function, which runs on a thread;
- `threads`: threads that block, a synchronous function;
- `submit`: one thread that submits all items and then reads the results.

The overhead includes that of the callers: tasks, futures and the switches between threads. At most 50 µs per item.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import inferry

ITEMS = 20_000
CALLERS = 256
THREADS = 64
MAX_BATCH = 64
REPEATS = 7
MAX_OVERHEAD_US = 50.0

batches = 0


def increment(items: list[int]) -> list[int]:
    global batches
    batches += 1
    return [item + 1 for item in items]


async def increment_async(items: list[int]) -> list[int]:
    return increment(items)


in_thread = inferry.batched(max_batch=MAX_BATCH)(increment)
on_loop = inferry.batched(max_batch=MAX_BATCH)(increment_async)


def direct() -> None:
    for start in range(0, ITEMS, MAX_BATCH):
        increment(list(range(start, min(start + MAX_BATCH, ITEMS))))


async def by_tasks(call: Callable[[int], Awaitable[int]]) -> None:
    async def caller(first: int) -> None:
        for item in range(first, ITEMS, CALLERS):
            assert await call(item) == item + 1

    await asyncio.gather(*(caller(first) for first in range(CALLERS)))


async def by_gather() -> None:
    for start in range(0, ITEMS, ITEMS // 4):
        await asyncio.gather(*(on_loop(item) for item in range(start, start + ITEMS // 4)))


def by_threads() -> None:
    def caller(first: int) -> None:
        for item in range(first, ITEMS, THREADS):
            assert in_thread(item) == item + 1

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(caller, range(THREADS)))


def by_submit() -> None:
    for start in range(0, ITEMS, ITEMS // 4):
        for future in [in_thread.submit(item) for item in range(start, start + ITEMS // 4)]:
            future.result()


ARMS: dict[str, Callable[[], None]] = {
    "asyncio": lambda: asyncio.run(by_tasks(on_loop)),
    "asyncio_gather": lambda: asyncio.run(by_gather()),
    "asyncio_to_thread": lambda: asyncio.run(by_tasks(in_thread.acall)),
    "threads": by_threads,
    "submit": by_submit,
}


def measure() -> dict[str, Any]:
    global batches
    direct_us = [_timed(direct) for _ in range(REPEATS)]
    direct_median_us = statistics.median(direct_us)
    arms: dict[str, Any] = {}
    for name, run in ARMS.items():
        run()
        batches = 0
        overheads_us = sorted(_timed(run) - direct_median_us for _ in range(REPEATS))
        arms[name] = {
            "overhead_us_per_item": {
                "median": round(statistics.median(overheads_us), 1),
                "least": round(overheads_us[0], 1),
                "most": round(overheads_us[-1], 1),
            },
            "mean_batch": round(ITEMS * REPEATS / batches, 1),
        }
        print(f"{name:18} {arms[name]}")
    return {
        "items": ITEMS,
        "max_batch": MAX_BATCH,
        "callers": CALLERS,
        "threads": THREADS,
        "repeats": REPEATS,
        "direct_us_per_item": round(direct_median_us, 3),
        "arms": arms,
        "limit_us": MAX_OVERHEAD_US,
        "within_limit": all(arm["overhead_us_per_item"]["median"] <= MAX_OVERHEAD_US for arm in arms.values()),
    }


def _timed(run: Callable[[], None]) -> float:
    """Microseconds per item."""
    started_at = time.perf_counter()
    run()
    return (time.perf_counter() - started_at) / ITEMS * 1e6
