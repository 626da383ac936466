"""Asks a server whether it is alive, idle or not.

Belongs to the worker's event loop; its one task is started and closed by the worker. A server with calls is asked every
BUSY_S, an idle one every `interval_s`, one that is silent every SILENT_S, and at once when `wake` says so. A question
that is left open is followed by another one right away (see `liveness`).
"""

import asyncio
from collections.abc import Awaitable, Callable

from inferry.adapters.workers.liveness import Liveness, Verdict
from inferry.domain.clock import Clock

BUSY_S = 0.5
SILENT_S = 1.0


class LifeWatch:
    """`look` asks as usual, `ping` asks for something cheap and is used in doubt; neither raises, both tell `life`.

    `hear` brings `life` up to date with what calls have heard; `is_busy` says whether there are calls;
    `on_silent` is called once when the server falls silent. Where looks bring nothing but a sign of life
    (`only_in_silence`), none is made within BUSY_S of another sign.
    """

    def __init__(
        self,
        life: Liveness,
        clock: Clock,
        interval_s: float,
        *,
        look: Callable[[], Awaitable[object]],
        ping: Callable[[], Awaitable[object]],
        hear: Callable[[], None],
        is_busy: Callable[[], bool],
        on_silent: Callable[[], None],
        only_in_silence: bool = False,
    ) -> None:
        self._life = life
        self._clock = clock
        self._interval_s = interval_s
        self._look = look
        self._ping = ping
        self._hear = hear
        self._is_busy = is_busy
        self._on_silent = on_silent
        self._only_in_silence = only_in_silence
        self._work = asyncio.Event()
        self._alarm = asyncio.Event()
        self._is_alarmed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def work_came(self) -> None:
        """Calls are on their way: an idle server is asked now."""
        self._work.set()

    def wake(self) -> None:
        """Ask now: a call could not reach the server."""
        self._is_alarmed = True
        self._work.set()
        self._alarm.set()

    async def _run(self) -> None:
        while True:
            asked_at = self._clock.now()
            self._hear()
            if self._may_skip(asked_at):
                await self._rest(Verdict.HEARD)
                continue
            self._is_alarmed = False
            await (self._ping() if self._life.is_in_doubt else self._look())
            self._hear()
            verdict = self._life.judge(asked_at)
            if verdict is Verdict.FELL_SILENT:
                self._on_silent()
            if verdict is not Verdict.DOUBT:
                await self._rest(verdict)

    def _may_skip(self, now: float) -> bool:
        is_wanted = self._is_alarmed or self._life.is_in_doubt or not self._only_in_silence
        return not is_wanted and now < self._life.heard_at + BUSY_S

    async def _rest(self, verdict: Verdict) -> None:
        if self._is_alarmed:
            return  # it came while a question was open
        is_idle = verdict is Verdict.HEARD and not self._is_busy()
        event = self._work if is_idle else self._alarm
        rest_s = SILENT_S if verdict is not Verdict.HEARD else self._interval_s if is_idle else BUSY_S
        event.clear()
        try:
            async with asyncio.timeout(rest_s):
                await event.wait()
        except TimeoutError:
            pass
