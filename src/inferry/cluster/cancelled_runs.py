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
        self._reader: asyncio.Task[None] | None = None
        self._announcements: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def announce(self, tenant: str, run_id: str) -> None:
        """Tell the other gateways that a run was cancelled here. Repeated until Redis has it."""
        task = asyncio.get_running_loop().create_task(self._announce(tenant, run_id))
        self._announcements.add(task)
        task.add_done_callback(self._announcements.discard)

    async def close(self) -> None:
        tasks = [*self._announcements, *(() if self._reader is None else (self._reader,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
