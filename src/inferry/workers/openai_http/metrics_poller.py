"""Reads an engine's metrics page.

Belongs to the worker's event loop. `liveness_prober` asks for readings by the clock; whatever needs a reading of this
moment asks for one too, and those that ask together share it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError
from inferry.workers.openai_http.load_estimate import LoadEstimate
from inferry.workers.openai_http.metrics_parser import MetricsSnapshot, read_metrics
from inferry.workers.openai_http.profiles import MetricNames

log = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.02
"""A page costs the engine's server a few milliseconds: nobody makes it write one more often than this."""

FetchPage = Callable[[], Awaitable[tuple[int, bytes]]]


class OwnCalls(Protocol):
    """What the gateway itself has at the engine."""

    @property
    def open_calls(self) -> int: ...

    @property
    def ended_calls(self) -> int:
        """How many have ended, ever."""


class MetricsPoller:
    def __init__(
        self,
        fetch: FetchPage,
        names: MetricNames,
        own_calls: OwnCalls,
        clock: Clock,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.estimate = LoadEstimate()
        self._fetch = fetch
        self._names = names
        self._own_calls = own_calls
        self._clock = clock
        self._on_news = on_news
        self._lock = asyncio.Lock()
        self._next_poll: asyncio.Task[MetricsSnapshot | None] | None = None
        self._started_at = 0.0
        self._tasks: set[asyncio.Task[MetricsSnapshot | None]] = set()

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def poll(self) -> MetricsSnapshot | None:
        """A reading whose question was sent after this call; None where the engine gives none."""
        if self._next_poll is None:
            # One under way may have been written before what the caller wants to see: this is the one after it.
            self._next_poll = asyncio.get_running_loop().create_task(self._poll_after_current())
            self._tasks.add(self._next_poll)
            self._next_poll.add_done_callback(self._tasks.discard)
        return await asyncio.shield(self._next_poll)

    async def _poll_after_current(self) -> MetricsSnapshot | None:
        async with self._lock:
            await asyncio.sleep(self._started_at + MIN_INTERVAL_S - self._clock.now())
            self._started_at = self._clock.now()
            self._next_poll = None
            return await self._poll_once()

    async def _poll_once(self) -> MetricsSnapshot | None:
        ended = self._own_calls.ended_calls
        try:
            status, page = await self._fetch()
        except GatewayError:
            return None
        snapshot = read_metrics(page, self._names) if status == 200 else None
        if snapshot is not None:
            # Calls that ended meanwhile may or may not be part of it.
            own_calls = self._own_calls.open_calls + self._own_calls.ended_calls - ended
            self.estimate.update(snapshot, own_calls, self._clock.now())
            self._on_news()
        return snapshot
