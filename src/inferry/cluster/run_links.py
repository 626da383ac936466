"""Parents of runs, shared by all gateways: links in a stream of Redis, learned by every gateway in the same order.

Belongs to the event loop it is started on. One task appends and reads, one exchange at a time; links that are announced
meanwhile go into the next one. An exchange that fails is repeated until it succeeds.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from inferry.domain.shared_limits import AuthorityUnavailable

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Interval at which links of other gateways are read."""
RETRY_S = 0.1
MAX_LINKS = 100_000
"""Links of this gateway that are kept, to repeat them to a Redis that has lost them. The oldest go first."""

Link = tuple[str, str, str]
"""Tenant, run and parent."""


class ReadLinks(NamedTuple):
    """Links after a position, and the new position. `is_all`: no further ones. `server` names the process of Redis."""

    position: str
    links: list[Link]
    is_all: bool
    server: str


class LinkStream(Protocol):
    async def exchange_links(self, position: str, links: Sequence[Link]) -> ReadLinks:
        """Append the links, and read those after the position."""


class RunLinks:
    """Implements `LinkLog`. `learn(tenant, run_id, parent_id)` is called for all links since the Unix time `since`."""

    def __init__(self, stream: LinkStream, learn: Callable[[str, str, str], None], since: float) -> None:
        self._stream = stream
        self._learn = learn
        self._position = f"{max(0, int(since * 1000))}-0"
        self._server = ""
        self._own: OrderedDict[tuple[str, str], Link] = OrderedDict()
        self._unsent: dict[tuple[str, str], Link] = {}
        self._synced: asyncio.Future[None] | None = None
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def announce(self, tenant: str, run_id: str, parent_id: str) -> None:
        key, link = (tenant, run_id), (tenant, run_id, parent_id)
        if key in self._own:
            return  # the first parent stays
        self._own[key] = self._unsent[key] = link
        if len(self._own) > MAX_LINKS:
            oldest, _ = self._own.popitem(last=False)
            self._unsent.pop(oldest, None)
        self._wanted.set()

    def synced(self) -> "asyncio.Future[None]":
        if self._synced is None:
            self._synced = asyncio.get_running_loop().create_future()
            self._wanted.set()
        return self._synced

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wanted.wait()
            self._wanted.clear()
            unsent, self._unsent = self._unsent, {}
            synced, self._synced = self._synced, None
            await self._exchange(unsent)
            if synced is not None:
                synced.set_result(None)

    async def _exchange(self, unsent: dict[tuple[str, str], Link]) -> None:
        """Append the links and read to the end of the stream. Repeated until it succeeds."""
        while True:
            try:
                while not await self._exchange_page(unsent):
                    pass
                return
            except AuthorityUnavailable:
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("failed to exchange parents of runs")
                await asyncio.sleep(RETRY_S)

    async def _exchange_page(self, unsent: dict[tuple[str, str], Link]) -> bool:
        """Append the links, which are then no longer unsent, and read the next ones; whether these are all."""
        found = await self._stream.exchange_links(self._position, list(unsent.values()))
        unsent.clear()
        self._position = found.position
        for link in found.links:
            self._learn(*link)
        is_other, self._server = self._server not in ("", found.server), found.server
        if is_other:
            # Another process may lack the last links: every gateway repeats its own, and reads all again.
            unsent.update(self._own)
            self._position = "0-0"
        return found.is_all and not is_other
