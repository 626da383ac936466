"""The ready jobs of a queue in order of arrival."""

from collections import deque
from typing import Final

from inferry.scheduling.queues.queued_job import READY, QueuedJob

_COMPACTION_THRESHOLD: Final = 16


class ArrivalOrder:
    """Jobs that left are dropped when they surface, or when they outnumber those that are ready."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: deque[QueuedJob] = deque()

    def add(self, entry: QueuedJob, ready: int) -> None:
        """A job is ready, one of `ready`."""
        self._entries.append(entry)
        if len(self._entries) > 2 * ready + _COMPACTION_THRESHOLD:
            self._entries = deque([other for other in self._entries if other.state is READY])

    def clear(self) -> None:
        """No job is ready any more."""
        self._entries.clear()

    def oldest(self) -> QueuedJob | None:
        entries = self._entries
        while entries:
            if entries[0].state is READY:
                return entries[0]
            entries.popleft()
        return None
