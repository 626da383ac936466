"""Ends of holds and pauses, and deadlines of queued jobs, earliest first."""

from heapq import heapify, heappop, heappush
from typing import Final

from inferry.scheduling.queues.queued_job import QueuedJob

_COMPACTION_THRESHOLD: Final = 64


class TimerHeap:
    """Tickets by the time they are due. A ticket has one date at most; a new one replaces the old.

    Dropped dates stay in the `heap` until they surface or until they outnumber the live ones, so that neither dropping
    nor looking costs more as the backlog grows.
    """

    __slots__ = ("_dropped", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, QueuedJob]] = []
        self._dropped = 0

    def __len__(self) -> int:
        return len(self.heap) - self._dropped

    def put(self, entry: QueuedJob, due: float) -> None:
        if entry.due is not None:
            self.drop(entry)
        entry.due = due
        heappush(self.heap, (due, entry.number, entry))

    def drop(self, entry: QueuedJob) -> None:
        if entry.due is None:
            return
        entry.due = None
        self._dropped += 1
        if self._dropped > _COMPACTION_THRESHOLD and 2 * self._dropped > len(self.heap):
            self.heap = [item for item in self.heap if item[2].due == item[0]]
            heapify(self.heap)
            self._dropped = 0

    def next(self) -> float | None:
        """When the next ticket is due."""
        heap = self.heap
        while heap:
            due, _, entry = heap[0]
            if entry.due == due:
                return due
            heappop(heap)
            self._dropped -= 1
        return None

    def pop(self, now: float) -> QueuedJob | None:
        """The next ticket that is due by now, taken off the agenda."""
        due = self.next()
        if due is None or due > now:
            return None
        entry = heappop(self.heap)[2]
        entry.due = None
        return entry
