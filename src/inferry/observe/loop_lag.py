"""Lag of the event loop: how late a timer runs because callbacks before it took long."""

import asyncio
from collections.abc import Callable

from inferry.observe.counters import FastHistogram

INTERVAL_S = 0.1


class LoopLagProbe:
    """Measures the lag of the event loop it is started on, every INTERVAL_S seconds. `now` is a monotonic clock."""

    def __init__(self, lag: FastHistogram, now: Callable[[], float]) -> None:
        self._lag = lag
        self._now = now
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due_at = self._now() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._fire)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        # A timer may run up to a millisecond early, by the resolution of the loop's clock.
        self._lag.observe(max(0.0, self._now() - self._due_at))
        self.start()
