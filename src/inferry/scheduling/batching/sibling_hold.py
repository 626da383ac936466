"""Hold a first job for its siblings, where several busy workers batch continuously (`sibling_window` says when)."""

from inferry.scheduling.batching.hold_rule import HoldRule
from inferry.scheduling.queues.lane_queue import RouteQueue
from inferry.scheduling.queues.queued_job import QueuedJob


class SiblingHold(HoldRule):
    def hold_until(self, entry: QueuedJob, queue: RouteQueue, now: float) -> float | None:
        route = queue.route
        if not entry.job.prefix or route.any_pads or len(route.workers) < 2 or route.has_idle():
            return None
        entry.sibling_window, held_until = queue.sibling_windows.arrived(entry.job, now)
        return held_until
