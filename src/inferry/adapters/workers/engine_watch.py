"""Reads an engine's metrics page.

Belongs to the worker's event loop. `life_watch` asks for readings by the clock; whatever needs a reading of this moment
asks for one too, and those that ask together share it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from inferry.adapters.workers.beliefs import Beliefs
from inferry.adapters.workers.profiles import MetricNames
from inferry.adapters.workers.readings import Reading, read_metrics
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError

log = logging.getLogger(__name__)

LEAST_S = 0.02
"""A page costs the engine's server a few milliseconds: nobody makes it write one more often than this."""

Ask = Callable[[], Awaitable[tuple[int, bytes]]]


class OwnCalls(Protocol):
    """What the gateway itself has at the engine."""

    @property
    def open_calls(self) -> int: ...

    @property
    def ended_calls(self) -> int:
        """How many have ended, ever."""


class EngineWatch:
    def __init__(
        self, ask: Ask, names: MetricNames, own: OwnCalls, clock: Clock, on_news: Callable[[], None] = lambda: None
    ) -> None:
        self.beliefs = Beliefs()
        self._ask = ask
        self._names = names
        self._own = own
        self._clock = clock
        self._on_news = on_news
        self._lock = asyncio.Lock()
        self._coming: asyncio.Task[Reading | None] | None = None
        self._began_at = 0.0
        self._tasks: set[asyncio.Task[Reading | None]] = set()

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> Reading | None:
        """A reading whose question was sent after this call; None where the engine gives none."""
        if self._coming is None:
            # One under way may have been written before what the caller wants to see: this is the one after it.
            self._coming = asyncio.get_running_loop().create_task(self._after_the_one_under_way())
            self._tasks.add(self._coming)
            self._coming.add_done_callback(self._tasks.discard)
        return await asyncio.shield(self._coming)

    async def _after_the_one_under_way(self) -> Reading | None:
        async with self._lock:
            await asyncio.sleep(self._began_at + LEAST_S - self._clock.now())
            self._began_at = self._clock.now()
            self._coming = None
            return await self._read()

    async def _read(self) -> Reading | None:
        ended = self._own.ended_calls
        try:
            status, page = await self._ask()
        except GatewayError:
            return None
        reading = read_metrics(page, self._names) if status == 200 else None
        if reading is not None:
            # Calls that ended meanwhile may or may not be part of it.
            own = self._own.open_calls + self._own.ended_calls - ended
            self.beliefs.learn(reading, own, self._clock.now())
            self._on_news()
        return reading
