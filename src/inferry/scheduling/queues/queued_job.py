"""A job's place in the scheduler."""

import enum
from typing import TYPE_CHECKING

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.scheduling.queues.fair_share import RunAccount

if TYPE_CHECKING:
    from inferry.scheduling.batching.packing import WorkerState
    from inferry.scheduling.batching.prefix_groups import PrefixGroup
    from inferry.scheduling.batching.sibling_window import SiblingWindow
    from inferry.scheduling.queues.lane_queue import RouteQueue


class QueueState(enum.Enum):
    """Where a job is. It moves forward only, but for a promise that could not be kept; it is in one stage at a time."""

    HELD = "held"
    """Waiting for company, of its own accord."""
    UNCONTENDED = "alone"
    """Come when nobody else was ready, and in no row yet: the next tick sees whether it needs one."""
    READY = "ready"
    """Waiting for room."""
    NOMINATED = "promised"
    """Waiting for room that is being made for it, and counted on that worker already."""
    PLANNED = "planned"
    """On a worker, and counted there until it ends."""
    REMOVED = "gone"


# By name: looking a member up on its class is a noticeable part of what a job costs.
HELD, UNCONTENDED, READY, NOMINATED, PLANNED, REMOVED = QueueState
_IMMEDIATE = ReleaseReason.IMMEDIATE


class BlockedHead:
    """What is remembered of a job that stood first in its queue and found no room.

    In round `tried_round` of planning no worker of its route had place for it in the part `fill` of its room, and
    nothing but time can change that before a worker changes; time can at `retry_at`, where it lacked only pace.
    `reserved_worker` is the worker that is kept for it; `backfilled_tokens` are the tokens of jobs that went before it
    meanwhile.
    """

    __slots__ = ("backfilled_tokens", "fill", "reserved_worker", "retry_at", "tried_round")

    def __init__(self) -> None:
        self.tried_round = -1
        self.fill = 0.0
        self.retry_at: float | None = None
        self.reserved_worker: WorkerState | None = None
        self.backfilled_tokens = 0


class QueuedJob:
    """One attempt at a job, from its offer to its end.

    `lane` is the job's, as a plain number. `due` is when something happens to a queued job by itself: the end of its
    hold, then its deadline. `prefill_tokens` falls to zero when the prefill is over; `cold_tokens` is what it was when
    the job came. `charged_tokens` is what of its prompt, `produced` what of its output its accounts have been charged.
    `sibling_window` is the family it came with, where that is watched.
    """

    __slots__ = (
        "blocked",
        "charged_tokens",
        "cold_tokens",
        "due",
        "job",
        "kv_tokens",
        "lane",
        "number",
        "prefill_tokens",
        "prefix_group",
        "produced",
        "queue",
        "reason",
        "run",
        "sibling_window",
        "state",
        "worker",
    )

    def __init__(self, job: InferenceJob, number: int, queue: "RouteQueue", run: RunAccount) -> None:
        self.job = job
        self.number = number
        self.queue = queue
        self.lane = queue.lane_queue.number
        self.run = run
        footprint = job.footprint
        prompt = footprint.prompt.expected
        uncached = prompt - footprint.cached.expected
        self.prefill_tokens = self.cold_tokens = uncached if uncached > 0 else 1
        self.kv_tokens = prompt + footprint.output.expected
        self.state = HELD
        self.reason = _IMMEDIATE
        self.due: float | None = None
        self.prefix_group: PrefixGroup | None = None
        self.blocked: BlockedHead | None = None
        self.sibling_window: SiblingWindow | None = None
        self.worker: WorkerState | None = None
        self.charged_tokens = 0
        self.produced = 0
