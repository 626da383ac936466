"""Writes the watermarks of budgets to the database, off the event loop.

Belongs to the loop it is started on. One batch is written at a time, by a thread of its own; requests meanwhile go into
the next batch. A batch that cannot be written is retried until it can: jobs that wait for it fail after BUDGET_HOLD_S,
and jobs without ceilings never wait.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from inferry.admission.overflow_budget import DAY_SCOPE, RUN_SCOPE, OverflowBudget
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.watermarks import RELEASE_BATCH, WATERMARK_IDLE_S
from inferry.dispatch.budget_writer import BudgetWriter
from inferry.domain.clock import Clock
from inferry.domain.spending import Watermark, WatermarkBatch
from inferry.ledger.recorder import Recorder

log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Interval at which unused watermarks are released."""
INITIAL_RETRY_S, MAX_RETRY_S = 0.05, 1.0
CLOSE_TIMEOUT_S = 5.0
"""Longest wait for the last batch at shutdown. A watermark that remains reduces its account's ceiling, nothing else."""


class WatermarkStore(Protocol):
    """Stores watermarks. Its methods block on a disk."""

    def read(self) -> list[Watermark]: ...
    def write(self, batch: WatermarkBatch) -> None: ...
    def close(self) -> None: ...


class WatermarkWriter(BudgetWriter):
    """Writes the gate's watermarks. Its constructor reads the store and counts what a killed process left."""

    def __init__(
        self,
        gate: QuotaGate,
        store: WatermarkStore,
        recorder: Recorder,
        clock: Clock,
        overflow: OverflowBudget | None = None,
        *,
        sweep_s: float = SWEEP_S,
        idle_s: float = WATERMARK_IDLE_S,
    ) -> None:
        super().__init__()
        assert gate.watermarks is not None, "a watermark store needs a gate with watermarks"
        self._gate = gate
        self._watermarks = gate.watermarks
        self._store = store
        self._recorder = recorder
        self._clock = clock
        self._overflow = overflow
        self._sweep_s = sweep_s
        self._idle_s = idle_s
        self._writer = ThreadPoolExecutor(1, "inferry-watermarks")
        self._task: asyncio.Task[None] | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        counted = self._restore(store.read())
        if counted:
            log.warning(
                "the gateway was not stopped cleanly: %d budget accounts count the most that may have been used as "
                "spent (at most one block more than was used)",
                counted,
            )

    def start(self) -> None:
        self._sweep()

    def wake(self) -> None:
        """Start a write. The task begins after the current burst of callbacks, whose requests form one batch."""
        if self._task is None and self._watermarks.is_due:
            self._task = asyncio.get_running_loop().create_task(self._write())

    def rewrite_all(self) -> None:
        """The database was replaced: write all watermarks to the new one."""
        self._gate.rewrite_watermarks()
        if self._overflow is not None:
            self._watermarks.rewrite_all(self._overflow.accounts())
        self.wake()

    async def close(self) -> None:
        """Release all watermarks, since the ledger has every row; then close the store."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self._release_idle(0.0, len(self._watermarks))
        self.wake()
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)
            task.cancel()
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    def _restore(self, stored: list[Watermark]) -> int:
        """Count what a killed process left; returns the number of accounts. Watermarks of overflow stay in the
        database while it is off."""
        now, wall = self._clock.now(), self._clock.wall()
        of_overflow = [one for one in stored if one.scope in (DAY_SCOPE, RUN_SCOPE)]
        others = [one for one in stored if one.scope not in (DAY_SCOPE, RUN_SCOPE)]
        counted = self._gate.restore_watermarks(others, now, wall)
        if self._overflow is not None:
            counted += self._overflow.restore_watermarks(of_overflow, now, wall)
        return counted

    def _sweep(self) -> None:
        self._release_idle(self._idle_s)
        self.wake()
        self._sweep_timer = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)

    def _release_idle(self, idle_s: float, limit: int = RELEASE_BATCH) -> None:
        if self._recorder.dropped:
            self._watermarks.retain_all()
        self._watermarks.release_idle(self._clock.now(), self._recorder.accepted, self._recorder.settled, idle_s, limit)

    async def _write(self) -> None:
        try:
            while self._watermarks.is_due:
                batch = self._watermarks.take_batch(self._clock.wall())
                await self._write_with_retry(batch)
                self._watermarks.batch_written(batch.number, self._clock.now())
                self._report_written(batch.number)
        finally:
            self._task = None

    async def _write_with_retry(self, batch: WatermarkBatch) -> None:
        delay_s = INITIAL_RETRY_S
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._store.write, batch)
            except Exception as error:
                log.error("cannot write budget watermarks (retry in %.2f s): %s", delay_s, error)
            else:
                return
            # Not in the handler: compiled code that awaits there leaves its exception to other tasks.
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)
