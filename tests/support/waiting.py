"""Wait for an event that a test cannot be told of. The limit only ends a test that would never end."""

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 120.0


def until(
    condition: Callable[[], object],
    limit_s: float = LIMIT_S,
    *,
    every_s: float = 0.01,
    problem: Callable[[], object] = lambda: "it did not happen",
) -> None:
    """Block until the condition holds. `problem` is what a failure shows."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, problem()
        time.sleep(every_s)


async def async_until(condition: Callable[[], object], limit_s: float = LIMIT_S, *, every_s: float = 0.01) -> None:
    """Wait until the condition holds, in the time of the event loop."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(every_s)
