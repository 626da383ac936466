"""What goes wrong, by seed: workers that die, stall, fall silent or are drained; messages that come late or twice."""

import enum
from collections.abc import Sequence

from msgspec import Struct

from inferry.sim.rng import named_rng


class WorkerFaultKind(enum.Enum):
    DEATH = "death"
    """Every connection breaks; after a while the worker is back, empty."""
    STALL = "stall"
    """Nothing moves for a while, then everything goes on."""
    DRAIN = "drain"
    """It takes nothing new for a while, and finishes what it has."""


class JobFaultKind(enum.Enum):
    RESET = "reset"
    """The connection breaks after some tokens; none: before the first."""
    SILENCE = "silence"
    """The connection stays open and nothing comes any more."""
    DUPLICATE = "duplicate"
    """First token and end are told twice."""
    LATE = "late"
    """First token and end are told again long after the end."""
    DISCONNECT = "disconnect"
    """The client leaves."""


class WorkerFault(Struct, frozen=True, gc=False):
    kind: WorkerFaultKind
    worker: int
    at: float
    duration_s: float


class JobFault(Struct, frozen=True, gc=False):
    """Trouble of a job's first attempt: after so many tokens, or for a disconnect so long after its arrival."""

    kind: JobFaultKind
    after_tokens: int = 0
    after_s: float = 0.0


class Faults(Struct, frozen=True):
    workers: tuple[WorkerFault, ...] = ()
    jobs: dict[int, JobFault] = {}


_JOB_FAULT_KINDS: Sequence[JobFaultKind] = tuple(JobFaultKind)
_WORKER_FAULT_KINDS: Sequence[WorkerFaultKind] = tuple(WorkerFaultKind)


def sample_faults(seed: int, *, workers: int, jobs: int, seconds: float, job_share: float = 0.25) -> Faults:
    """The faults of a seed: about one per worker, and one for a share of the jobs."""
    rng = named_rng(seed, "faults")
    worker_faults = tuple(
        WorkerFault(
            rng.choice(_WORKER_FAULT_KINDS), rng.randrange(workers), rng.uniform(0, seconds), rng.uniform(0.01, 0.5)
        )
        for _ in range(rng.randint(0, 2 * workers))
    )
    job_faults = {
        number: JobFault(rng.choice(_JOB_FAULT_KINDS), rng.randint(0, 4), rng.uniform(0, seconds / 2))
        for number in range(jobs)
        if rng.random() < job_share
    }
    return Faults(worker_faults, job_faults)
