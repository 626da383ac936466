"""Time that an agent spends in its tools.

The gateway measures the time between the calls of a run (`time.tool_ms`). Which tool it was is known here only.
"""

import threading
import time
from types import TracebackType


class ToolTime:
    """Calls of one tool, those that raised an exception among them, and their total time."""

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0
        self.seconds = 0.0


class Timer:
    """Times one block."""

    def __init__(self, times: "ToolTimes", name: str) -> None:
        self._times = times
        self._name = name
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._times.add(self._name, time.monotonic() - self._started, failed=kind is not None)


class ToolTimes:
    """Tool times of a run by name. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_name: dict[str, ToolTime] = {}

    def add(self, name: str, seconds: float, *, failed: bool = False) -> None:
        with self._lock:
            found = self.by_name.setdefault(name, ToolTime())
            found.calls += 1
            found.errors += failed
            found.seconds += seconds
