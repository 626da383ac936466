"""Which waiting jobs begin next: lanes are independent, tenants of a lane take turns, and each keeps to a window. Pure.

The scheduler orders what it is offered. This queue bounds how much it is offered, so that the jobs of one tenant
neither fill a lane nor are refused over and over.
"""

from collections import deque
from typing import NamedTuple

from inferry.durable.window import Window


class WaitingJob(NamedTuple):
    id: str
    tenant: str
    lane: str


class _Flow:
    """The jobs of one tenant in one lane."""

    def __init__(self) -> None:
        self.waiting: deque[WaitingJob] = deque()
        self.in_flight = 0
        self.window = Window()


class AsyncJobQueue:
    """`concurrency` bounds the jobs in flight of each lane, shared equally between tenants."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._flows: dict[tuple[str, str], _Flow] = {}

    def add(self, job: WaitingJob) -> None:
        self._flow(job).waiting.append(job)

    def next(self, now: float) -> WaitingJob | None:
        """The job that begins now; the caller reports its end, or that it was refused."""
        for key, flow in self._flows.items():
            if flow.waiting and flow.window.allows(flow.in_flight, self._share(key[0]), now):
                # The order of the dict is the order of turns.
                self._flows[key] = self._flows.pop(key)
                flow.in_flight += 1
                return flow.waiting.popleft()
        return None

    def wake_at(self, now: float) -> float | None:
        """When a job that was refused may begin, if no other event comes first."""
        times = [flow.window.not_before for flow in self._flows.values() if flow.waiting]
        return min((time for time in times if time > now), default=None)

    def refused(self, job: WaitingJob, retry_at: float) -> None:
        """The job waits again, in front."""
        flow = self._flow(job)
        flow.in_flight -= 1
        flow.waiting.appendleft(job)
        flow.window.refused(flow.in_flight, retry_at)

    def ended(self, job: WaitingJob) -> None:
        flow = self._flow(job)
        flow.in_flight -= 1
        flow.window.answered()
        if not flow.in_flight and not flow.waiting:
            del self._flows[job.lane, job.tenant]

    def _flow(self, job: WaitingJob) -> _Flow:
        return self._flows.setdefault((job.lane, job.tenant), _Flow())

    def _share(self, lane: str) -> int:
        return max(1, self._concurrency // sum(1 for key in self._flows if key[0] == lane))
