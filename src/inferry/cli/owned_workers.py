"""The workers of the gateway that owns them, those of the configuration and those of the `workers_file`."""

import asyncio
from collections.abc import Callable

from inferry.dispatch.pool import Pool
from inferry.domain.ports import Worker
from inferry.workers.leased import lease


class OwnedWorkers:
    """Adds workers to the pool that are used only while `may_send`. Those in `drained` are drained as they come."""

    def __init__(self, pool: Pool) -> None:
        self.may_send: Callable[[], bool] = lambda: False
        self.drained: set[str] = set()
        self._pool = pool
        self._names: set[str] = set()

    def add(self, worker: Worker, kind: str = "") -> None:
        self._pool.add(lease(worker, lambda: self.may_send()), kind)
        self._names.add(worker.name)
        if worker.name in self.drained:
            self.drained.remove(worker.name)
            self._pool.drain(worker.name)

    async def remove(self, name: str, grace_s: float) -> None:
        await self._pool.remove(name, grace_s)
        self._names.discard(name)

    async def clear(self) -> None:
        """Remove all of them at once: their jobs are lost as if they had failed."""
        await asyncio.gather(*(self.remove(name, 0.0) for name in list(self._names)))

    def worker(self, name: str) -> Worker | None:
        return self._pool.worker(name)
