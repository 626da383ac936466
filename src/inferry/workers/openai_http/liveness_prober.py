"""Probes whether a server is alive.

Belongs to the worker's event loop; the worker starts and closes its one task. A server with calls is probed every
BUSY_INTERVAL_S, an idle one every `interval_s`, an unresponsive one every UNRESPONSIVE_INTERVAL_S, and at once after
`wake`. A missed probe is followed by another one immediately (see `liveness`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from inferry.domain.clock import Clock
from inferry.workers.openai_http.liveness import Liveness, Verdict

BUSY_INTERVAL_S: Final = 0.5
UNRESPONSIVE_INTERVAL_S: Final = 1.0


class LivenessProber:
    """`poll` is the usual probe, `ping` a cheap one after a missed probe. Neither raises; both update `liveness`.

    `sync_activity` updates `liveness` with the activity of calls; `is_busy` says whether there are calls;
    `on_unresponsive` is called once when the server becomes unresponsive. With `skip_when_active` no probe is sent
    within BUSY_INTERVAL_S of other activity.
    """

    def __init__(
        self,
        liveness: Liveness,
        clock: Clock,
        interval_s: float,
        *,
        poll: Callable[[], Awaitable[object]],
        ping: Callable[[], Awaitable[object]],
        sync_activity: Callable[[], None],
        is_busy: Callable[[], bool],
        on_unresponsive: Callable[[], None],
        skip_when_active: bool = False,
    ) -> None:
        self._liveness = liveness
        self._clock = clock
        self._interval_s = interval_s
        self._poll = poll
        self._ping = ping
        self._sync_activity = sync_activity
        self._is_busy = is_busy
        self._on_unresponsive = on_unresponsive
        self._skip_when_active = skip_when_active
        self._work_event = asyncio.Event()
        self._wake_event = asyncio.Event()
        self._is_woken = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def on_calls(self) -> None:
        """Probe an idle server now: calls are being sent."""
        self._work_event.set()

    def wake(self) -> None:
        """Probe now: a call could not reach the server."""
        self._is_woken = True
        self._work_event.set()
        self._wake_event.set()

    async def _run(self) -> None:
        while True:
            probed_at = self._clock.now()
            self._sync_activity()
            if self._may_skip(probed_at):
                await self._sleep(Verdict.ALIVE)
                continue
            self._is_woken = False
            await (self._ping() if self._liveness.is_suspect else self._poll())
            self._sync_activity()
            verdict = self._liveness.evaluate(probed_at)
            if verdict is Verdict.BECAME_UNRESPONSIVE:
                self._on_unresponsive()
            if verdict is not Verdict.SUSPECT:
                await self._sleep(verdict)

    def _may_skip(self, now: float) -> bool:
        is_due = self._is_woken or self._liveness.is_suspect or not self._skip_when_active
        return not is_due and now < self._liveness.last_activity_at + BUSY_INTERVAL_S

    async def _sleep(self, verdict: Verdict) -> None:
        if self._is_woken:
            return  # woken during a probe
        is_idle = verdict is Verdict.ALIVE and not self._is_busy()
        event = self._work_event if is_idle else self._wake_event
        sleep_s = (
            UNRESPONSIVE_INTERVAL_S
            if verdict is not Verdict.ALIVE
            else self._interval_s
            if is_idle
            else BUSY_INTERVAL_S
        )
        event.clear()
        try:
            async with asyncio.timeout(sleep_s):
                await event.wait()
        except TimeoutError:
            pass
