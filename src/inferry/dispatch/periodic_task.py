"""A function that is called at intervals, as a task with an owner."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class PeriodicTask:
    """Calls `poll` every `interval_s` until it is closed. An exception is logged, and the next call follows."""

    def __init__(self, poll: Callable[[], Awaitable[None]], interval_s: float, subject: str) -> None:
        self._poll = poll
        self._interval_s = interval_s
        self._subject = subject
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._poll()
            except Exception:
                log.exception("failed to poll %s", self._subject)
