"""A job's place in the scheduler."""

import enum
from typing import TYPE_CHECKING

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.scheduling.fairness import Run

if TYPE_CHECKING:
    from inferry.scheduling.kin import Kin
    from inferry.scheduling.lanes import Queue
    from inferry.scheduling.packing import WorkerState
    from inferry.scheduling.siblings import Watch


class Stage(enum.Enum):
    """Where a job is. It moves forward only, but for a promise that could not be kept; it is in one stage at a time."""

    HELD = "held"
    """Waiting for company, of its own accord."""
    ALONE = "alone"
    """Come when nobody else was ready, and in no row yet: the next tick sees whether it needs one."""
    READY = "ready"
    """Waiting for room."""
    PROMISED = "promised"
    """Waiting for room that is being made for it, and counted on that worker already."""
    PLANNED = "planned"
    """On a worker, and counted there until it ends."""
    GONE = "gone"


# By name: looking a member up on its class is a noticeable part of what a job costs.
HELD, ALONE, READY, PROMISED, PLANNED, GONE = Stage
_IMMEDIATE = ReleaseReason.IMMEDIATE


class Wait:
    """What is remembered of a job that stood first in its queue and found no room.

    In round `looked` of planning no worker of its route had place for it in the part `fill` of its room, and nothing
    but time can change that before a worker changes; time can at `retry_at`, where it lacked only pace. `kept` is the
    worker that is kept for it; `passed` are the tokens of jobs that went before it meanwhile.
    """

    __slots__ = ("fill", "kept", "looked", "passed", "retry_at")

    def __init__(self) -> None:
        self.looked = -1
        self.fill = 0.0
        self.retry_at: float | None = None
        self.kept: WorkerState | None = None
        self.passed = 0


class Ticket:
    """One attempt at a job, from its offer to its end.

    `lane` is the job's, as a plain number. `due` is when something happens to a queued job by itself: the end of its
    hold, then its deadline. `prefill_tokens` falls to zero when the prefill is over; `cold_tokens` is what it was when
    the job came. `charged` is what of its prompt, `produced` what of its output its accounts have been charged. `watch`
    is the family it came with, where that is watched.
    """

    __slots__ = (
        "charged",
        "cold_tokens",
        "due",
        "job",
        "kin",
        "kv_tokens",
        "lane",
        "number",
        "prefill_tokens",
        "produced",
        "queue",
        "reason",
        "run",
        "stage",
        "wait",
        "watch",
        "worker",
    )

    def __init__(self, job: InferenceJob, number: int, queue: "Queue", run: Run) -> None:
        self.job = job
        self.number = number
        self.queue = queue
        self.lane = queue.line.number
        self.run = run
        footprint = job.footprint
        prompt = footprint.prompt.expected
        uncached = prompt - footprint.cached.expected
        self.prefill_tokens = self.cold_tokens = uncached if uncached > 0 else 1
        self.kv_tokens = prompt + footprint.output.expected
        self.stage = HELD
        self.reason = _IMMEDIATE
        self.due: float | None = None
        self.kin: Kin | None = None
        self.wait: Wait | None = None
        self.watch: Watch | None = None
        self.worker: WorkerState | None = None
        self.charged = 0
        self.produced = 0
