"""Time as a value: seconds on a clock that never goes back."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic clock; only differences mean anything."""

    def wall(self) -> float:
        """Seconds since the Unix epoch, for what people read."""


class SystemClock:
    # The functions themselves: the path of a call asks for the time more often than for anything else.
    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class ManualClock:
    """A clock that moves only when told to; what simulations and tests pass around."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
