"""A job's place in the scheduler."""

import enum
from typing import TYPE_CHECKING

from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import ReleaseReason
from inferry.scheduling.fairness import Account

if TYPE_CHECKING:
    from inferry.scheduling.flows import Flow
    from inferry.scheduling.kin import Kin
    from inferry.scheduling.lanes import Queue
    from inferry.scheduling.packing import WorkerState


class Stage(enum.Enum):
    """Where a job is. It moves forward only, but for a promise that could not be kept; it is in one stage at a time."""

    HELD = "held"
    """Waiting for company, of its own accord."""
    READY = "ready"
    """Waiting for room."""
    PROMISED = "promised"
    """Waiting for room that is being made for it, and counted on that worker already."""
    PLANNED = "planned"
    """On a worker, and counted there until it ends."""
    GONE = "gone"


# By name: looking a member up on its class is a noticeable part of what a job costs.
HELD, READY, PROMISED, PLANNED, GONE = Stage
_IMMEDIATE = ReleaseReason.IMMEDIATE


class Ticket:
    """One attempt at a job, from its offer to its end.

    `due` is when something happens to a queued job by itself: the end of its hold, then its deadline. `prefill_tokens`
    falls to zero when the prefill is over; `cold_tokens` is what it was when the job came. `charged` is what of its prompt, `produced` what of its output its accounts
    have been charged. `passed` are the tokens of jobs that went before it while it waited as the first of its queue.
    """

    __slots__ = (
        "charged",
        "cold_tokens",
        "decoding",
        "due",
        "flow",
        "job",
        "kin",
        "kv_tokens",
        "leaving",
        "number",
        "passed",
        "prefill_tokens",
        "produced",
        "queue",
        "reason",
        "run",
        "stage",
        "tenant",
        "worker",
    )

    def __init__(self, job: InferenceJob, number: int, queue: "Queue", tenant: Account, run: Account) -> None:
        self.job = job
        self.number = number
        self.queue = queue
        self.tenant = tenant
        self.run = run
        self.stage = HELD
        footprint = job.footprint
        self.kv_tokens = footprint.peak_kv_tokens
        self.prefill_tokens = self.cold_tokens = footprint.prefill_tokens
        self.due: float | None = None
        self.reason = _IMMEDIATE
        self.flow: Flow | None = None
        self.kin: Kin | None = None
        self.worker: WorkerState | None = None
        self.charged = 0
        self.produced = 0
        self.passed = 0
        self.decoding = False
        self.leaving = False
