"""Clocks: system time, and manual time for simulations and tests."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic clock with an arbitrary origin."""

    def wall(self) -> float:
        """Unix seconds."""


class SystemClock:
    # The functions themselves, without a wrapper: the hot path reads the time several times per call.
    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class ManualClock:
    """A clock that only `advance` moves."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("seconds must not be negative")
        self._now += seconds
