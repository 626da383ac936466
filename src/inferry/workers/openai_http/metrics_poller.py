"""Reads an engine's metrics page.

Belongs to the worker's event loop. `liveness_prober` polls at intervals; a cancellation polls when it needs a current
reading. Concurrent callers share one.
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
"""Minimum time between readings: a page costs the engine's server a few milliseconds."""

FetchPage = Callable[[], Awaitable[tuple[int, bytes]]]


class OwnCalls(Protocol):
    """The gateway's own calls at the engine."""

    @property
    def open_calls(self) -> int: ...

    @property
    def ended_calls(self) -> int:
        """Calls that have ended since the start."""


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
        """A reading that was requested after this call; None where the engine gives none."""
        if self._next_poll is None:
            # A reading under way may be too old for the caller, so this one follows it.
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
            # The reading may include calls that ended meanwhile.
            own_calls = self._own_calls.open_calls + self._own_calls.ended_calls - ended
            self.estimate.update(snapshot, own_calls, self._clock.now())
            self._on_news()
        return snapshot
