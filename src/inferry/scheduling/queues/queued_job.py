"""A job's entry in the scheduler: its state, the tokens it counts for, and whether it may borrow workers."""

import enum
from collections import deque
from typing import Final

from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import ReleaseReason
from inferry.domain.routes import BatchKey, RouteKey
from inferry.scheduling.batching.prefix_key import PrefixKey
from inferry.scheduling.batching.sibling_window import SiblingWindow
from inferry.scheduling.lane_rules import LaneRules
from inferry.scheduling.queues.bound_interval import BoundInterval
from inferry.scheduling.queues.fair_share import RunAccount


class QueueState(enum.Enum):
    """Where a job is. It moves forward only, except from NOMINATED back to READY when its worker changes."""

    HELD = "held"
    """Held for others to join its batch."""
    PAUSED = "paused"
    """Its run has no place in the KV cache of a worker (`sessions`)."""
    READY = "ready"
    """Waiting for capacity."""
    NOMINATED = "nominated"
    """Waiting for jobs that are being preempted for it. Counted on their worker already."""
    PLANNED = "planned"
    """Sent to a worker, and counted there until it ends."""
    REMOVED = "removed"


# Final names are static in compiled code: looking a member up on its class is a noticeable part of what a job costs.
HELD: Final = QueueState.HELD
PAUSED: Final = QueueState.PAUSED
READY: Final = QueueState.READY
NOMINATED: Final = QueueState.NOMINATED
PLANNED: Final = QueueState.PLANNED
REMOVED: Final = QueueState.REMOVED
_IMMEDIATE: Final = ReleaseReason.IMMEDIATE
QueueKey = tuple[int, RouteKey | BatchKey]
"""Settings version, and the route or batch key."""
MAX_PREEMPTIONS = 3
"""A job that was stopped this often runs to its end."""


class BlockedHead:
    """What is remembered of the head of a queue that no worker accepted.

    In round `tried_round` of planning no worker of its route accepted it into the part `fill` of its capacity; None
    where some workers were not tried. Only a worker that changes can accept it before `retry_at`, the time at which the
    prefill rate of a worker allows it. `reserved_worker` is the name of the worker reserved for it. `backfilled_tokens`
    counts the tokens of jobs that went before it meanwhile.
    """

    __slots__ = ("backfilled_tokens", "fill", "reserved_worker", "retry_at", "tried_round")

    def __init__(self) -> None:
        self.tried_round: int | None = None
        self.fill = 0.0
        self.retry_at: float | None = None
        self.reserved_worker: str | None = None
        self.backfilled_tokens = 0


class QueuedJob:
    """One attempt at a job, from its offer to its end.

    `queue_key` names its queue within the lane, `worker` the worker that counts it. `due` is the next time at which it
    changes by itself: the end of its hold, then its deadline. `prefill_tokens` falls to zero at the first token;
    `cold_tokens` is its value on arrival. `charged_tokens` and `produced` are the prompt and output tokens charged to
    its accounts so far. `prefix_group` are the ready jobs of its queue that share its prefix, `sibling_window` those
    that arrive close to it. A job that `stays_in_groups` is not sent to borrowed workers. `is_pooled`: it embeds or
    scores. `is_released`: it is sent without the limits that hold jobs back. Its TTFT target runs from
    `slo_start_at`.

    For its decision record: the job is ready since `ready_at` (held since then, while it is held), after `held_s`
    seconds that the rule `held_by` held it. Its queue was bound by `bound_when_ready` then, and by `bound` when the job
    left it. `picked_by` is the rule that chose its worker.
    """

    # Written when the job becomes ready, leaves its queue and gets its worker; not before, since every job pays for it.
    ready_at: float
    bound_when_ready: BoundInterval | None
    bound: BoundInterval | None
    picked_by: str

    __slots__ = (
        "blocked",
        "bound",
        "bound_when_ready",
        "charged_tokens",
        "cold_tokens",
        "due",
        "held_by",
        "held_s",
        "is_pooled",
        "is_released",
        "job",
        "kv_tokens",
        "lane",
        "number",
        "picked_by",
        "prefill_tokens",
        "prefix_group",
        "produced",
        "queue_key",
        "ready_at",
        "reason",
        "rules",
        "run",
        "sibling_window",
        "slo_start_at",
        "state",
        "stays_in_groups",
        "worker",
    )

    def __init__(self, job: InferenceJob, number: int, rules: LaneRules, queue_key: QueueKey, run: RunAccount) -> None:
        self.job = job
        self.number = number
        self.rules = rules
        self.lane = rules.number
        self.queue_key = queue_key
        self.run = run
        self.slo_start_at = job.arrived_at + job.ttft_allowance_s
        footprint = job.footprint
        prompt = footprint.prompt.expected
        uncached = prompt - footprint.cached.expected
        self.prefill_tokens = self.cold_tokens = uncached if uncached > 0 else 1
        self.kv_tokens = prompt + footprint.output.expected
        self.is_pooled = False
        self.is_released = False
        self.stays_in_groups = rules.borrow_groups and not _can_be_stopped(job)
        self.state: QueueState = HELD
        self.reason: ReleaseReason = _IMMEDIATE
        self.due: float | None = None
        self.prefix_group: PrefixGroup | None = None
        self.blocked: BlockedHead | None = None
        self.sibling_window: SiblingWindow | None = None
        self.worker: str | None = None
        self.charged_tokens = 0
        self.produced = 0
        self.held_by: str | None = None
        self.held_s = 0.0


def _can_be_stopped(job: InferenceJob) -> bool:
    """Whether the job can be evicted at any time and go on later. A restart repeats what a stream has delivered."""
    return job.preemptions < MAX_PREEMPTIONS and (job.resume is ResumeMode.CONTINUE or not job.stream)


class PrefixGroup:
    """The ready jobs of one queue that share tenant, template or run, and the beginning of the prompt.

    `entries` also holds jobs that have left since; `size` counts those that have not.
    """

    __slots__ = ("entries", "key", "size")

    def __init__(self, key: PrefixKey) -> None:
        self.key = key
        self.size = 0
        self.entries: deque[QueuedJob] = deque()
