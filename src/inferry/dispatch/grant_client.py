"""Gets grants of shared limits: performs the steps of `GrantProtocol` with the authority and the database.

Belongs to the loop it is started on. One step at a time; requests meanwhile go into the next exchange. A step that
fails is repeated until it succeeds: jobs that wait for a grant fail after BUDGET_HOLD_S, and jobs of callers without
limits never wait. Once the TTL at the authority may have passed, no grant is spent.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from inferry.admission.grant_protocol import Exchange, GrantProtocol, ReadHoldings, Rebuild, Step, WriteHoldings
from inferry.admission.grants import GrantTracker, settled_amounts
from inferry.dispatch.budget_writer import BudgetWriter
from inferry.domain.clock import Clock
from inferry.domain.shared_limits import AuthorityUnavailable, Holding, LimitAuthority
from inferry.domain.spending import Spending
from inferry.ledger.recorder import Recorder

log = logging.getLogger(__name__)

SWEEP_S = 0.5
"""Interval at which spending is settled and unused grants are returned."""
INITIAL_RETRY_S, MAX_RETRY_S = 0.05, 0.5
REBUILD_PAUSE_S = 0.05
CLOSE_TIMEOUT_S = 5.0
"""Longest wait for the return of grants at shutdown. What is not returned counts as spent."""

T = TypeVar("T")


class HoldingStore(Protocol):
    """Stores what gateways hold. Its methods block on a disk."""

    def write(self, holder: str, generation: int, amounts: dict[str, int], at: float) -> int: ...
    def read(self, holder: str) -> tuple[int, dict[str, int]]: ...
    def begin_rebuild(self, now: float) -> tuple[int, list[Holding], list[Spending]]: ...
    def close(self) -> None: ...


class GrantClient(BudgetWriter):
    """The grants of one gateway. `holder` names this start of it: no other process ever has the same name."""

    def __init__(
        self,
        holder: str,
        tracker: GrantTracker,
        authority: LimitAuthority,
        store: HoldingStore,
        recorder: Recorder,
        clock: Clock,
        ttl_s: float,
        *,
        sweep_s: float = SWEEP_S,
    ) -> None:
        super().__init__()
        self.holder = holder
        self.is_up = False
        self.waits = 0
        self.wait_s = 0.0
        self._waits_since: dict[str, float] = {}
        self._tracker = tracker
        self._protocol = GrantProtocol(tracker, ttl_s)
        self._authority = authority
        self._store = store
        self._recorder = recorder
        self._clock = clock
        self._sweep_s = sweep_s
        self._executor = ThreadPoolExecutor(1, "inferry-holdings")
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._sweep()

    def wake(self) -> None:
        if self._tracker.is_due:
            self._wanted.set()

    def wait(self, batch: int, job_id: str) -> None:
        self.waits += 1
        self._waits_since[job_id] = self._clock.now()
        super().wait(batch, job_id)

    @property
    def generation(self) -> int:
        """How often the authority was built; -1 while that is unknown."""
        return self._protocol.generation

    def rewrite_all(self) -> None:
        """A database that was replaced has no holdings: the authority is rebuilt from what it has."""
        log.error("the ledger was replaced: shared limits count from the new one")

    async def close(self) -> None:
        """Return all grants, since the ledger has every row."""
        self._is_closing = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self._tracker.sweep(self._recorder.accepted, self._recorder.settled, limit=len(self._tracker))
        self._tracker.release_all()
        self._wanted.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    def _sweep(self) -> None:
        self._protocol.check_validity(self._clock.now())
        recorder = self._recorder
        self._tracker.sweep(recorder.accepted, recorder.settled, is_complete=not recorder.dropped)
        self.wake()
        self._sweep_timer = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)

    async def _run(self) -> None:
        delay_s = INITIAL_RETRY_S
        while not (self._is_closing and self._protocol.is_idle):
            step = self._protocol.next_step(self._clock.now())
            if step is None:
                await self._wait_for_work()
                continue
            failure = await self._try(step)
            if failure is None:
                delay_s = REBUILD_PAUSE_S
                if self._protocol.is_waiting:
                    await asyncio.sleep(delay_s)
                continue
            if delay_s == MAX_RETRY_S or self.is_up:
                log.error("shared limits are not available (retry in %g s): %s", delay_s, failure)
            self.is_up = False
            self._protocol.check_validity(self._clock.now())
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)

    async def _wait_for_work(self) -> None:
        self._wanted.clear()
        timeout_s = max(0.0, self._protocol.renew_at - self._clock.now())
        try:
            async with asyncio.timeout(timeout_s):
                await self._wanted.wait()
        except TimeoutError:
            pass

    async def _try(self, step: Step) -> Exception | None:
        """Perform the step; return why it failed."""
        try:
            await self._perform(step)
        except AuthorityUnavailable as error:
            return error
        except Exception as error:  # the database has failed: whatever its driver raises
            return error
        return None

    async def _perform(self, step: Step) -> None:
        protocol = self._protocol
        if isinstance(step, Exchange):
            sent_at = self._clock.now()
            found = await self._authority.exchange(self.holder, step.number, step.generation, step.asks)
            self.is_up = True
            protocol.exchanged(found, sent_at, self._clock.now())
        elif isinstance(step, WriteHoldings):
            wall = self._clock.wall()
            write = self._store.write
            found_generation = await self._in_thread(lambda: write(self.holder, step.generation, step.amounts, wall))
            protocol.written(found_generation, self._clock.now())
        elif isinstance(step, ReadHoldings):
            protocol.read(*await self._in_thread(lambda: self._store.read(self.holder)))
        elif isinstance(step, Rebuild):
            await self._rebuild()
        self._report_written(self._tracker.written)

    async def _rebuild(self) -> None:
        wall = self._clock.wall()
        generation, held, spending = await self._in_thread(lambda: self._store.begin_rebuild(wall))
        await self._authority.rebuild(generation, settled_amounts(spending), held)
        log.warning("shared limits were rebuilt from the ledger: generation %d, %d holdings", generation, len(held))
        self._protocol.rebuilt()

    def _report_written(self, written: int) -> None:
        super()._report_written(written)
        if self._waits_since:
            now, waiting = self._clock.now(), {job_id for jobs in self._waiting.values() for job_id in jobs}
            for job_id in [job_id for job_id in self._waits_since if job_id not in waiting]:
                self.wait_s += now - self._waits_since.pop(job_id)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)
