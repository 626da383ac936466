"""Loads past spending from the ledger for ceilings that are set while the gateway runs."""

import asyncio
import logging
from collections.abc import Callable

from inferry.admission.quota_gate import QuotaGate
from inferry.domain.clock import Clock
from inferry.domain.spending import Spending

log = logging.getLogger(__name__)


RETRY_S = 1.0


class SpendingSync:
    """Updates the gate's accounts from the ledger, off the event loop. Nothing is counted twice.

    A ledger that cannot be read is asked again until it answers. Meanwhile new ceilings count from now on.
    """

    def __init__(self, gate: QuotaGate, clock: Clock, spent: Callable[[], list[Spending]]) -> None:
        self._gate = gate
        self._clock = clock
        self._spent = spent
        self._sync_requested = False
        self._task: asyncio.Task[None] | None = None

    def request_sync(self) -> None:
        """Schedule an update. Several requests make one; a request during an update makes another."""
        self._sync_requested = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._read())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while self._sync_requested:
                self._sync_requested = False
                try:
                    self._gate.restore(await asyncio.to_thread(self._spent), self._clock.now())
                except Exception as error:
                    log.error("cannot read past spending (retry in %g s): %s", RETRY_S, error)
                    self._sync_requested = failed = True
                else:
                    failed = False
                # Not in the handler: compiled code that awaits there leaves its exception to other tasks.
                if failed:
                    await asyncio.sleep(RETRY_S)
        finally:
            self._task = None
