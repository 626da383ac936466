"""Time that an agent spends in its tools.

The gateway measures the time between the calls of a run (`time.tool_ms`). Which tool it was is known here, and told at
the end of the run.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

MAX_REPORTED = 32
MAX_NAME_CHARS = 64
"""Bounds of a report, which are the gateway's."""


class ToolTime:
    """Calls of one tool, those that raised an exception among them, and their total time."""

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0
        self.seconds = 0.0


class Timer:
    """Times one block."""

    def __init__(self, times: "ToolTimes", name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tool is a str, not {type(name).__name__}")
        self._times = times
        self._name = name
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = self._times.clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._times.add(self._name, self._times.clock() - self._started, failed=kind is not None)


class ToolTimes:
    """Tool times of a run by name. May be used from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self.by_name: dict[str, ToolTime] = {}

    def add(self, name: str, seconds: float, *, failed: bool = False) -> None:
        with self._lock:
            found = self.by_name.setdefault(name, ToolTime())
            found.calls += 1
            found.errors += failed
            found.seconds += seconds

    def report(self) -> dict[str, dict[str, Any]]:
        """Those that took most of the time, for the gateway. Names that are too long or not printable are left out."""
        with self._lock:
            named = [one for one in self.by_name.items() if 0 < len(one[0]) <= MAX_NAME_CHARS and one[0].isprintable()]
            named.sort(key=lambda one: one[1].seconds, reverse=True)
            return {
                name: {"calls": tool.calls, "errors": tool.errors, "seconds": tool.seconds}
                for name, tool in named[:MAX_REPORTED]
            }
