"""Cancellation that a library must not lose."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_cancellation() -> Iterator[None]:
    """Raise CancelledError where the task was cancelled inside and the work there ended in another way.

    redis-py sends with `asyncio.wait_for`, which before Python 3.12 returns what was computed to a task that was
    cancelled at that moment. A loop around it would never end, and `close` would wait for it without end.
    """
    task = asyncio.current_task()
    assert task is not None
    cancels = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > cancels:
            raise asyncio.CancelledError
