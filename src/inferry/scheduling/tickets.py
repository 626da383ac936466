"""A job's place in the scheduler."""

import enum
from typing import TYPE_CHECKING

from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import ReleaseReason

if TYPE_CHECKING:
    from inferry.scheduling.lanes import Queue
    from inferry.scheduling.packing import WorkerState


class Stage(enum.Enum):
    """Where a job is. It moves forward only, and is in one stage at a time."""

    HELD = "held"
    """Waiting for company, of its own accord."""
    READY = "ready"
    """Waiting for room."""
    PLANNED = "planned"
    """On a worker, and counted there until it ends."""
    GONE = "gone"


# By name: looking a member up on its class is a noticeable part of what a job costs.
HELD, READY, PLANNED, GONE = Stage
_IMMEDIATE = ReleaseReason.IMMEDIATE


class Ticket:
    """One job from its offer to its end.

    `due` is when something happens to a queued job by itself: the end of its hold, then its deadline. `prefill_tokens`
    falls to zero when the prefill is over.
    """

    __slots__ = ("due", "job", "kv_tokens", "number", "prefill_tokens", "queue", "reason", "stage", "worker")

    def __init__(self, job: InferenceJob, number: int, queue: "Queue") -> None:
        self.job = job
        self.number = number
        self.queue = queue
        self.stage = HELD
        footprint = job.footprint
        self.kv_tokens = footprint.peak_kv_tokens
        self.prefill_tokens = footprint.prefill_tokens
        self.due: float | None = None
        self.reason = _IMMEDIATE
        self.worker: WorkerState | None = None
