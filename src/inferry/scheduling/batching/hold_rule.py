"""What a hold rule is asked. Holding never overrides capacity: a released job still waits for that."""

from typing import Final

from inferry.scheduling.queues.lane_queue import RouteQueue
from inferry.scheduling.queues.queued_job import QueuedJob


class HoldRule:
    """One reason to hold a job for others to join its batch. Rules are asked in order until one holds the job.

    `name` is what decision records call the rule.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name

    def hold_until(self, entry: QueuedJob, queue: RouteQueue, now: float) -> float | None:
        """The time to hold a job that arrives now until; None to leave it to the next rule. Asked once per job."""
        raise NotImplementedError
