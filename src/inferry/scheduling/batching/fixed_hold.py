"""`window: fixed`: hold every job for the whole batching window."""

from math import inf

from inferry.scheduling.batching.hold_rule import HoldRule
from inferry.scheduling.queues.lane_queue import RouteQueue
from inferry.scheduling.queues.queued_job import QueuedJob


class FixedHold(HoldRule):
    def hold_until(self, entry: QueuedJob, queue: RouteQueue, now: float) -> float | None:
        return inf if queue.rules.window == "fixed" else None
