"""Deletes expired rows in slices, so that no transaction is long."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from inferry.domain.clock import Clock
from inferry.durable.executor import StoreExecutor

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 30.0
SLICE = 100

Sweep = Callable[[float, int], int]
"""(now, limit) → how many rows it deleted; fewer than `limit` means that none is left. Blocks."""


class Sweeper:
    """Belongs to the event loop it is started on."""

    def __init__(
        self, sweeps: Sequence[Sweep], executor: StoreExecutor, clock: Clock, *, interval_s: float = SWEEP_INTERVAL_S
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
        """Delete everything that has expired; return how many rows."""
        deleted = 0
        for sweep in self._sweeps:
            count = SLICE
            while count >= SLICE:
                count = await self._executor.run(sweep, self._clock.wall(), SLICE)
                deleted += count
        return deleted

    async def _run(self) -> None:
        while True:
            try:
                deleted = await self.sweep()
                if deleted:
                    log.info("deleted %d expired rows", deleted)
            except Exception as error:
                log.error("cannot delete expired rows (next try in %g s): %s", self._interval_s, type(error).__name__)
            await asyncio.sleep(self._interval_s)
