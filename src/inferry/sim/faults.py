"""What goes wrong, by seed: workers that die, stall, fall silent or are drained; messages that come late or twice."""

import enum
from collections.abc import Sequence

from msgspec import Struct

from inferry.sim.draws import stream


class WorkerTrouble(enum.Enum):
    DEATH = "death"
    """Every connection breaks; after a while the worker is back, empty."""
    STALL = "stall"
    """Nothing moves for a while, then everything goes on."""
    DRAIN = "drain"
    """It takes nothing new for a while, and finishes what it has."""


class JobTrouble(enum.Enum):
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
    kind: WorkerTrouble
    worker: int
    at: float
    lasts_s: float


class JobFault(Struct, frozen=True, gc=False):
    """Trouble of a job's first attempt: after so many tokens, or for a disconnect so long after its arrival."""

    kind: JobTrouble
    after_tokens: int = 0
    after_s: float = 0.0


class Faults(Struct, frozen=True):
    workers: tuple[WorkerFault, ...] = ()
    jobs: dict[int, JobFault] = {}


_JOB_TROUBLES: Sequence[JobTrouble] = tuple(JobTrouble)
_WORKER_TROUBLES: Sequence[WorkerTrouble] = tuple(WorkerTrouble)


def draw_faults(seed: int, *, workers: int, jobs: int, seconds: float, job_share: float = 0.25) -> Faults:
    """The faults of a seed: about one per worker, and one for a share of the jobs."""
    draw = stream(seed, "faults")
    broken = tuple(
        WorkerFault(
            draw.choice(_WORKER_TROUBLES), draw.randrange(workers), draw.uniform(0, seconds), draw.uniform(0.01, 0.5)
        )
        for _ in range(draw.randint(0, 2 * workers))
    )
    troubled = {
        number: JobFault(draw.choice(_JOB_TROUBLES), draw.randint(0, 4), draw.uniform(0, seconds / 2))
        for number in range(jobs)
        if draw.random() < job_share
    }
    return Faults(broken, troubled)
