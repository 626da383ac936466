"""Virtual time: a heap of timed actions. Ties run in insertion order, so that a simulation is deterministic."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[float, Any], None]


class Events:
    """Actions by time. `now` only moves forward; an action in the past runs now."""

    __slots__ = ("_heap", "_scheduled", "now")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._scheduled = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def scheduled(self) -> int:
        """Number of actions scheduled so far."""
        return self._scheduled

    @property
    def next_at(self) -> float | None:
        """When the next action is due."""
        return self._heap[0][0] if self._heap else None

    def at(self, when: float, action: Action, argument: Any = None) -> None:
        self._scheduled += 1
        heappush(self._heap, (when if when > self.now else self.now, self._scheduled, action, argument))

    def run(self, until: float | None = None, on_progress: Callable[[float], None] | None = None) -> None:
        """Run until no action is left, or until `until`. `on_progress` gets the time every few thousand actions."""
        heap = self._heap
        count = 0
        while heap:
            if until is not None and heap[0][0] > until:
                break
            self.now, _, action, argument = heappop(heap)
            action(self.now, argument)
            count += 1
            if on_progress is not None and not count & 2047:
                on_progress(self.now)
