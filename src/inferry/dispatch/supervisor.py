"""Supervision of one worker in the pool: start, probe by a real generation, watch, take out, probe again.

The one task of a `WorkerSupervisor` runs `run_forever`; everything happens on its event loop. A worker's own report of
readiness is not enough: an endpoint that answers health checks may still fail at its first token.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable
from typing import Final

from inferry.dispatch.circuit_breaker import BreakerState, CircuitBreaker
from inferry.dispatch.probe import probe
from inferry.dispatch.values import HealthPolicy
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError
from inferry.domain.ports import Worker
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
MAX_RETRY_S: Final = 5.0
MAX_NAME_CHARS: Final = 100
MAX_LISTED_WORKERS: Final = 20


class WorkerSupervisor:
    """A worker, its effective view, and whether it is drained.

    `view` is the view that the scheduler gets; `on_change` is called when it has changed. `is_drained` keeps new
    work away whatever the worker's state; `is_being_removed` says that this is for good, and then `job_ended` is set
    at the end of each of its jobs. `was_up`: it has generated before. `overdue` counts its calls that were retried
    elsewhere for being overdue. `since` is when its phase began.
    """

    def __init__(
        self,
        worker: Worker,
        kind: str,
        clock: Clock,
        policy: HealthPolicy,
        on_change: Callable[["WorkerSupervisor"], None],
    ) -> None:
        self.worker = worker
        self.kind = kind
        self.breaker = CircuitBreaker(policy, seed=zlib.crc32(worker.name.encode()))
        self.is_drained = False
        self.was_up = False
        self.is_being_removed = False
        self.job_ended = asyncio.Event()
        self.overdue = 0
        self._pending_confirmations = 0
        self.task: asyncio.Task[None] | None = None
        self._clock = clock
        self._policy = policy
        self._on_change = on_change
        self._wake_event = asyncio.Event()
        self._probes = 0
        self._last_loss = ""
        self._serves_chat = True
        self.view = self._effective_view()
        self.since = clock.wall()

    @property
    def is_down(self) -> bool:
        """Whether the worker reports that it is down, or its breaker has not closed since."""
        return self.breaker.state is not BreakerState.CLOSED or self.worker.view().phase is Phase.DOWN

    def lost(self, job_id: str, cause: str) -> None:
        """A job was lost on the worker. After too many, it gets no more from this moment on."""
        self._last_loss = cause
        if self.breaker.lost(job_id, self._clock.now()):
            self.refresh()
        self._wake_event.set()

    def suspect(self, confirmation: "asyncio.Future[frozenset[str]]") -> None:
        """No new work until the cancel of an overdue call here has been answered."""
        self.overdue += 1
        self._pending_confirmations += 1
        confirmation.add_done_callback(self._confirmation_done)
        self.refresh()

    def _confirmation_done(self, _: "asyncio.Future[frozenset[str]]") -> None:
        self._pending_confirmations -= 1
        self.refresh()

    def wake(self) -> None:
        """Check the worker now instead of at the next interval."""
        self._wake_event.set()

    def refresh(self) -> None:
        """Update the view from what the worker reports and the breaker allows."""
        previous, view = self.view, self._effective_view()
        self.view = view
        if previous.phase is not view.phase:
            self.since = self._clock.wall()
        # A new observation time, or what the engine measures of itself, is no change for the scheduler.
        if (
            replace(
                previous,
                observed_at=view.observed_at,
                load=view.load,
                busy_s=view.busy_s,
                step_work=view.step_work,
                kv_blocks=view.kv_blocks,
                last_activity_at=view.last_activity_at,
            )
            != view
        ):
            self._on_change(self)

    async def run_forever(self) -> None:
        """Until cancelled."""
        await self._start()
        while True:
            await self._probe_until_ready()
            self.was_up = True
            log.info("worker %s is ready: %s", self.worker.name, ", ".join(sorted(self.worker.view().models)))
            while self.breaker.state is BreakerState.CLOSED and self.worker.view().phase is Phase.READY:
                self.breaker.advance(self._clock.now())
                self.refresh()
                await self._sleep(POLL_INTERVAL_S)
            reported = self.worker.view().phase
            reason = f"lost several jobs ({self._last_loss})" if reported is Phase.READY else f"is {reported.value}"
            log.warning("worker %s %s: it must pass a probe before it gets work", self.worker.name, reason)
            self.breaker.trip(self._clock.now())
            self.refresh()

    async def _start(self) -> None:
        delay = self._policy.initial_backoff_s
        while True:
            try:
                await self.worker.start()
                return
            except Exception as error:
                log.warning(
                    "worker %s failed to start (%s); retry in %.1f s", self.worker.name, _error_text(error), delay
                )
            self.refresh()
            await asyncio.sleep(delay)
            delay = min(delay * 2, MAX_RETRY_S)

    async def _probe_until_ready(self) -> None:
        while self.breaker.state is not BreakerState.CLOSED:
            await self._wait_for_probe()
            self.breaker.begin_probe()
            self.refresh()
            self._probes += 1
            try:
                serves_chat = await probe(self.worker, self._probes, self._clock.now())
            except Exception as error:
                now = self._clock.now()
                self.breaker.end_probe(False, now)
                pause_s = self.breaker.probe_at - now
                log.warning(
                    "worker %s failed its probe (%s); retry in %.1f s", self.worker.name, _error_text(error), pause_s
                )
                self.refresh()
            else:
                self.breaker.end_probe(True, self._clock.now())
                self._set_serves_chat(serves_chat)

    def _set_serves_chat(self, serves_chat: bool) -> None:
        if self._serves_chat and not serves_chat:
            model = self.worker.cards()[0].name
            log.warning("worker %s: model %s has no chat template; it serves completions only", self.worker.name, model)
        self._serves_chat = serves_chat

    async def _wait_for_probe(self) -> None:
        """Wait until the pause is over, or until a worker that reported itself down reports that it is up. A worker
        that reports that it is starting, down or draining is not probed.
        """
        previous_phase = self.worker.view().phase
        while (remaining_s := self.breaker.probe_at - self._clock.now()) > 0 or previous_phase in (
            Phase.STARTING,
            Phase.DOWN,
            Phase.DRAINING,
        ):
            await self._sleep(min(remaining_s, POLL_INTERVAL_S) if remaining_s > 0 else POLL_INTERVAL_S)
            self.refresh()  # the load of a worker that went down expires after a while
            phase = self.worker.view().phase
            if phase is Phase.READY and previous_phase is not Phase.READY:
                return
            previous_phase = phase

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake_event.wait()
        except TimeoutError:
            pass
        self._wake_event.clear()

    def _effective_view(self) -> WorkerView:
        reported = self.worker.view()
        if reported.phase is not Phase.READY:
            return reported
        if self.breaker.state is not BreakerState.CLOSED:
            return replace(
                reported,
                phase=Phase.DOWN if self.breaker.opens else Phase.STARTING,
                breaker_open=self.breaker.opens > 0,
            )
        capacity = self.breaker.capacity(reported.capacity, self._clock.now())
        if self.is_drained or self._pending_confirmations:
            return replace(reported, phase=Phase.DRAINING, capacity=capacity)
        return reported if capacity is reported.capacity else replace(reported, capacity=capacity)


def _error_text(error: Exception) -> str:
    return error.message if isinstance(error, GatewayError) else repr(error)


def unknown_worker(name: str, known: Iterable[str]) -> str:
    """The message that there is no worker of this name, with the names that there are."""
    asked = "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME_CHARS])
    names = [f"`{one}`" for one in known]
    listed = ", ".join(names[:MAX_LISTED_WORKERS]) + (", …" if len(names) > MAX_LISTED_WORKERS else "")
    return f"there is no worker `{asked}`; workers of this gateway: {listed or 'none'}"
