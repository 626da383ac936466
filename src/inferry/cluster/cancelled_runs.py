"""Cancelled runs of all gateways: announced in a stream of Redis, and applied here as they appear in it.

Belongs to the event loop it is started on. A gateway that was cut off continues where it stopped reading.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from inferry.domain.shared_limits import AuthorityUnavailable

log = logging.getLogger(__name__)

RETRY_S = 0.1
MAX_UNANNOUNCED = 100_000
"""Runs that wait to be announced while Redis is away. Further ones are cancelled at this gateway only."""


class RunStream(Protocol):
    """The stream. `next_cancelled` waits up to a second for (gateway, tenant, run), and returns the new position."""

    async def announce_cancelled(self, gateway: str, tenant: str, run_id: str) -> None: ...
    async def next_cancelled(self, position: str) -> tuple[str, list[tuple[str, str, str]]]: ...


class CancelledRuns:
    """`apply(tenant, run_id)` is called for runs that other gateways have cancelled since the Unix time `since`."""

    def __init__(self, gateway: str, stream: RunStream, apply: Callable[[str, str], None], since: float) -> None:
        self._gateway = gateway
        self._stream = stream
        self._apply = apply
        self._position = f"{max(0, int(since * 1000))}-0"
        self._unannounced: asyncio.Queue[tuple[str, str]] = asyncio.Queue(MAX_UNANNOUNCED)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        # One announcement at a time leaves the connections to Redis to the lease and the grants.
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._announce_all())]

    def announce(self, tenant: str, run_id: str) -> None:
        """Tell the other gateways that a run was cancelled here. Repeated until Redis has it."""
        try:
            self._unannounced.put_nowait((tenant, run_id))
        except asyncio.QueueFull:
            log.error("a cancelled run is not announced: %d others wait for Redis", MAX_UNANNOUNCED)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _announce_all(self) -> None:
        while True:
            await self._announce(*await self._unannounced.get())

    async def _announce(self, tenant: str, run_id: str) -> None:
        while True:
            with contextlib.suppress(AuthorityUnavailable):
                await self._stream.announce_cancelled(self._gateway, tenant, run_id)
                return
            await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        while True:
            try:
                self._position, runs = await self._stream.next_cancelled(self._position)
                for gateway, tenant, run_id in runs:
                    if gateway != self._gateway:
                        self._apply(tenant, run_id)
            except AuthorityUnavailable:
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("failed to read cancelled runs")
                await asyncio.sleep(RETRY_S)
