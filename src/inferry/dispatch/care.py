"""One worker's life in the pool: started, proven by a real generation, watched, taken out and tried again.

The one task of a `Care` runs `live`; everything happens on its event loop. Readiness is never taken on a worker's word
alone: an endpoint that answers health checks may still die at its first token.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable

from inferry.dispatch.health import Breaker, CircuitBreaker
from inferry.dispatch.probe import probe
from inferry.dispatch.values import HealthPolicy
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError
from inferry.domain.ports import Worker
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
LONGEST_RETRY_S = 5.0


class Care:
    """A worker, what is believed of it, and whether it is wanted.

    `view` is the belief the scheduler is to have; `tell` is called when it has changed. `is_drained` keeps new work
    away whatever the worker's state; `is_leaving` says that this is for good. `was_up`: it has generated before.
    `overdue` counts its calls that were retried elsewhere for being overdue. `since` is when its phase began.
    """

    def __init__(
        self, worker: Worker, kind: str, clock: Clock, policy: HealthPolicy, tell: Callable[["Care"], None]
    ) -> None:
        self.worker = worker
        self.kind = kind
        self.breaker = CircuitBreaker(policy, seed=zlib.crc32(worker.name.encode()))
        self.is_drained = False
        self.was_up = False
        self.is_leaving = False
        self.overdue = 0
        self._suspicions = 0
        self.task: asyncio.Task[None] | None = None
        self._clock = clock
        self._policy = policy
        self._tell = tell
        self._news = asyncio.Event()
        self._probes = 0
        self.view = self._see()
        self.since = clock.wall()

    @property
    def is_down(self) -> bool:
        """Whether the worker says that it is down, or its breaker has not closed since it was."""
        return self.breaker.state is not Breaker.CLOSED or self.worker.view().phase is Phase.DOWN

    def lost(self, job_id: str) -> None:
        """A job was lost on the worker. One that has lost too many gets no more from this moment on."""
        if self.breaker.lost(job_id, self._clock.now()):
            self.refresh()
        self._news.set()

    def suspect(self, confirmation: "asyncio.Future[frozenset[str]]") -> None:
        """No new work until the cancel of a call that was overdue here has come to something."""
        self.overdue += 1
        self._suspicions += 1
        confirmation.add_done_callback(self._suspect_less)
        self.refresh()

    def _suspect_less(self, _: "asyncio.Future[frozenset[str]]") -> None:
        self._suspicions -= 1
        self.refresh()

    def wake(self) -> None:
        """Look at the worker now and not at the next turn."""
        self._news.set()

    def refresh(self) -> None:
        """Believe what the worker says and the breaker allows."""
        known, view = self.view, self._see()
        self.view = view
        if known.phase is not view.phase:
            self.since = self._clock.wall()
        # A new date alone is no news to the scheduler.
        if replace(known, observed_at=view.observed_at, load=view.load, heard_at=view.heard_at) != view:
            self._tell(self)

    async def live(self) -> None:
        """Until cancelled."""
        await self._start()
        while True:
            await self._until_it_generates()
            self.was_up = True
            log.info("worker %s is ready: %s", self.worker.name, ", ".join(sorted(self.worker.view().models)))
            while self.breaker.state is Breaker.CLOSED and self.worker.view().phase is Phase.READY:
                self.breaker.look(self._clock.now())
                self.refresh()
                await self._pause(LOOK_EVERY_S)
            said = self.worker.view().phase
            why = "lost several jobs" if said is Phase.READY else f"is {said.value}"
            log.warning("worker %s %s: it has to generate before it gets work", self.worker.name, why)
            self.breaker.trip(self._clock.now())
            self.refresh()

    async def _start(self) -> None:
        delay = self._policy.first_pause_s
        while True:
            try:
                await self.worker.start()
                return
            except Exception as error:
                log.warning("worker %s could not start (%s); again in %.1f s", self.worker.name, _why(error), delay)
            self.refresh()
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_RETRY_S)

    async def _until_it_generates(self) -> None:
        while self.breaker.state is not Breaker.CLOSED:
            await self._until_a_probe_is_due()
            self.breaker.probing()
            self.refresh()
            self._probes += 1
            try:
                await probe(self.worker, self._probes, self._clock.now())
            except Exception as error:
                now = self._clock.now()
                self.breaker.probed(False, now)
                pause_s = self.breaker.probe_at - now
                log.warning(
                    "worker %s could not generate (%s); again in %.1f s", self.worker.name, _why(error), pause_s
                )
                self.refresh()
            else:
                self.breaker.probed(True, self._clock.now())

    async def _until_a_probe_is_due(self) -> None:
        """The pause is over, or the worker, which knew itself to be down, says that it is up again. One that says it is
        starting or down is not asked.
        """
        before = self.worker.view().phase
        while (left := self.breaker.probe_at - self._clock.now()) > 0 or before in (Phase.STARTING, Phase.DOWN):
            await self._pause(min(left, LOOK_EVERY_S) if left > 0 else LOOK_EVERY_S)
            self.refresh()  # what it is believed to do is over some time after it went down
            phase = self.worker.view().phase
            if phase is Phase.READY and before is not Phase.READY:
                return
            before = phase

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    def _see(self) -> WorkerView:
        said = self.worker.view()
        if said.phase is not Phase.READY:
            return said
        if self.breaker.state is not Breaker.CLOSED:
            return replace(said, phase=Phase.DOWN if self.breaker.opens else Phase.STARTING)
        room = self.breaker.room(said.room, self._clock.now())
        if self.is_drained or self._suspicions:
            return replace(said, phase=Phase.DRAINING, room=room)
        return said if room is said.room else replace(said, room=room)


def _why(error: Exception) -> str:
    return error.message if isinstance(error, GatewayError) else repr(error)
