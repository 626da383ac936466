"""Deletes expired rows in slices, so that no transaction is long."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from inferry.domain.clock import Clock
from inferry.durable.executor import StoreExecutor

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 30.0
SLICE = 100

Sweep = Callable[[float, int], int]
"""(now, limit) → how many rows it deleted, or `limit` where more may be left; 0 where there was none. Blocks."""


class Sweeper:
    """Belongs to the event loop it is started on. `sweeps` are by the name of what they delete."""

    def __init__(
        self,
        sweeps: Mapping[str, Sweep],
        executor: StoreExecutor,
        clock: Clock,
        *,
        interval_s: float = SWEEP_INTERVAL_S,
    ) -> None:
        self._sweeps = sweeps
        self._executor = executor
        self._clock = clock
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sweep(self) -> int:
        """Delete everything that has expired; return the sum of what the sweeps return."""
        deleted = dict.fromkeys(self._sweeps, 0)
        for name, sweep in self._sweeps.items():
            count = SLICE
            while count >= SLICE:
                count = await self._executor.run(sweep, self._clock.wall(), SLICE)
                deleted[name] += count
        if names := [name for name, count in deleted.items() if count]:
            log.info("deleted expired rows of %s", ", ".join(names))
        return sum(deleted.values())

    async def _run(self) -> None:
        while True:
            try:
                await self.sweep()
            except Exception as error:
                log.error("cannot delete expired rows (next try in %g s): %s", self._interval_s, type(error).__name__)
            await asyncio.sleep(self._interval_s)
