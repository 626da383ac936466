"""Supervises one engine process: starts it, checks that it makes progress, and restarts it when it is lost.

One event loop owns all state. `_supervise` is the only task: it starts the process, waits until the process is lost,
reports that to the worker, and starts it again after a backoff. `close` ends it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from inferry.domain.clock import Clock
from inferry.domain.workers import Phase
from inferry.engine.messages import (
    Aborted,
    AdapterChanged,
    Draining,
    Fatal,
    Heartbeat,
    Ready,
    Rejected,
    Returned,
    Stats,
    StepDone,
    ToEngine,
    decode_from_engine,
)
from inferry.workers.in_process.engine_link import Link, OpenLink

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
MISSED_CHECKS = 5
"""Checks in a row without a message after which an engine process counts as frozen and is killed. A process sends
several heartbeats between two checks. Checks are counted instead of seconds, because they stop while the gateway's own
process is stopped."""
UNRESPONSIVE_CHECKS = 3
"""Checks in a row without a message after which the engine is down and gets no work until the next message."""


class EngineFailed(RuntimeError):
    """The engine process ended before it was ready. The message has its last error."""


class EngineSupervisor:
    """`on_message` gets what concerns jobs and adapters, `on_lost` the reason when the process is lost. `on_ready` is
    called when a process is ready, before it gets jobs.

    The process is killed when it sends nothing for `MISSED_CHECKS` checks, idle or not, or when `has_work()` and it
    sends nothing but heartbeats for `stall_timeout_s`.
    """

    def __init__(
        self,
        name: str,
        open_link: OpenLink,
        clock: Clock,
        *,
        on_message: Callable[[StepDone | Returned | Aborted | Rejected | AdapterChanged], None],
        on_ready: Callable[[], None],
        on_lost: Callable[[str], None],
        has_work: Callable[[], bool],
        restart_backoff_s: float,
        restart_backoff_max_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._name = name
        self._open_link = open_link
        self._clock = clock
        self._on_message = on_message
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._has_work = has_work
        self._backoff_s = (restart_backoff_s, restart_backoff_max_s)
        self._stall_timeout_s = stall_timeout_s
        self._phase = Phase.STARTING
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.observed_at = clock.now()
        self.last_message_at: float | None = None
        self._progress_at = 0.0
        self._has_message = False
        self._missed_checks: int | None = None  # None until the first heartbeat
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the engine that runs now."""
        return None if self._link is None else self._link.pid

    @property
    def phase(self) -> Phase:
        is_unresponsive = (self._missed_checks or 0) >= UNRESPONSIVE_CHECKS
        return Phase.DOWN if is_unresponsive and self._phase is Phase.READY else self._phase

    @property
    def accepts_jobs(self) -> bool:
        """Whether the process has reported that it is ready and was not lost since."""
        return self._phase is Phase.READY

    def send(self, message: ToEngine) -> bool:
        """Send the message; return False where no process is connected."""
        if self._link is None:
            return False
        self._link.send(message)
        return True

    def restart_stall_timer(self) -> None:
        """Count the stall timeout from now: new work was sent."""
        self._progress_at = self._clock.now()

    async def start(self) -> None:
        """Start the process and return when it is ready. Raises EngineFailed. A failed start may be repeated."""
        if self._task is None or self._task.done():
            self._started = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._supervise(self._started), name=f"{self._name}-supervisor")
        assert self._started is not None
        await asyncio.shield(self._started)

    async def close(self) -> None:
        self._phase = Phase.DOWN
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineFailed("the worker was closed"))
            self._started.exception()  # retrieved here, because start() may not be awaited

    async def _supervise(self, started: "asyncio.Future[None]") -> None:
        first_backoff, max_backoff = self._backoff_s
        backoff = first_backoff
        while True:
            try:
                reason = await self._run_process()
            except OSError as error:
                reason = f"the engine process cannot be started: {error}"
            finally:
                was_ready, self.ready = self.ready is not None, None
                self._link = None
                self.stats = None
            self._set_phase(Phase.DOWN)
            self._on_lost(reason)
            if not started.done():
                started.set_exception(EngineFailed(reason))
                return
            backoff = first_backoff if was_ready else min(2 * backoff, max_backoff)
            logger.warning("worker %s lost its engine (%s), restarting it in %.1f s", self._name, reason, backoff)
            await asyncio.sleep(backoff)
            self._set_phase(Phase.STARTING)

    async def _run_process(self) -> str:
        """Run the process until it is lost; return why."""
        reason = "the engine process ended"
        async with self._open_link(self._receive) as link:
            self._phase = Phase.STARTING
            self._link = link
            self._progress_at = self._clock.now()
            self._missed_checks = self.last_message_at = None
            while not link.finished.done():
                await asyncio.wait({link.finished}, timeout=CHECK_INTERVAL_S)
                stall_reason = self._check_progress()
                if stall_reason is not None:
                    reason = stall_reason
                    logger.error("worker %s: %s, killing it", self._name, reason)
                    link.kill()
                    break
            return link.exit_message or reason

    def _check_progress(self) -> str | None:
        """Why the process has to be killed, or None."""
        if self._missed_checks is not None:
            self._missed_checks = 0 if self._has_message else self._missed_checks + 1
        self._has_message = False
        if (self._missed_checks or 0) >= MISSED_CHECKS:
            return f"the engine process sent no heartbeat for {MISSED_CHECKS * CHECK_INTERVAL_S:g} s"
        if self._has_work() and self._clock.now() - self._progress_at > self._stall_timeout_s:
            return f"the engine made no progress for {self._stall_timeout_s:g} s"
        return None

    def _receive(self, body: bytes) -> None:
        self._has_message = True
        self.last_message_at = self._clock.now()
        message = decode_from_engine(body)
        if not isinstance(message, Heartbeat):
            self._progress_at = self.last_message_at
        match message:
            case Heartbeat():
                self._missed_checks = 0
            case StepDone() | Aborted():
                self._on_message(message)
                self.stats = message.stats
                self.observed_at = self._clock.now()
            case Rejected() | Returned() | AdapterChanged():
                self._on_message(message)
            case Ready():
                self.ready = message
                self._on_ready()
                self._set_phase(Phase.READY)
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case Draining():
                self._set_phase(Phase.DRAINING)
            case Fatal(text):
                logger.error("worker %s: fatal engine error: %s", self._name, text)
                if self._link is not None:
                    self._link.exit_message = text

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self.observed_at = self._clock.now()
