"""Ceilings that come while the gateway runs count what was spent before them, as the ledger has it."""

import asyncio
import logging
from collections.abc import Callable

from inferry.admission.gate import Gate
from inferry.domain.clock import Clock
from inferry.domain.spending import Spent

log = logging.getLogger(__name__)


class Accounts:
    """Brings the gate's accounts up to what the ledger says, off the event loop. Nothing is counted twice."""

    def __init__(self, gate: Gate, clock: Clock, spent: Callable[[], list[Spent]]) -> None:
        self._gate = gate
        self._clock = clock
        self._spent = spent
        self._is_due = False
        self._task: asyncio.Task[None] | None = None

    def catch_up(self) -> None:
        """Soon: several changes at once are one reading, and one that comes while it is read makes another."""
        self._is_due = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._read())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while self._is_due:
                self._is_due = False
                self._gate.restore(await asyncio.to_thread(self._spent), self._clock.now())
        except Exception:
            log.exception("what was spent before could not be read: new ceilings count from now on")
        finally:
            self._task = None
