"""The queue that carries ids of stored work to gateways and pull-workers. It has no content: the database is the truth.

Each entry belongs to one stream per lane, model and tenant. A consumer holds what it took until it says that the work
has ended, or puts it back. Work whose holder has been silent is claimed by another consumer.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from urllib.parse import quote

from msgspec import Struct

MAX_DELIVERIES = 5
"""Work that was taken or claimed this often without an end is a dead letter: its request may be the reason."""


class QueueUnavailable(Exception):
    """The queue does not answer. What was asked may have been done."""


class NewWork(NamedTuple):
    """Work to be queued. `model` is empty where its request names none."""

    id: str
    lane: str
    model: str
    tenant: str

    @property
    def stream(self) -> str:
        return f"{self.lane}:{quoted(self.model)}:{quoted(self.tenant)}"


class QueueEntry(NamedTuple):
    """One delivery of work. `deliveries` counts them, this included. `holder` had the work before."""

    stream: str
    entry: str
    id: str
    deliveries: int = 1
    holder: str = ""

    @property
    def lane(self) -> str:
        return self.stream.partition(":")[0]

    @property
    def key(self) -> tuple[str, str]:
        """What tells entries apart: streams number their entries independently of one another."""
        return self.stream, self.entry


class Wanted(Struct, frozen=True, kw_only=True):
    """Which work a consumer takes: how much of each lane, in order; of `models` (None: of all), but not of `skipped`
    ones and not of streams that are `busy`.
    """

    lanes: Sequence[tuple[str, int]]
    models: Sequence[str] | None = None
    skipped: Sequence[str] = ()
    busy: Sequence[str] = ()


class Renewal(NamedTuple):
    """Keys of entries that another consumer has now; unfinished ids in the queue; pull-workers that are alive."""

    lost: frozenset[tuple[str, str]]
    depth: int
    pull_workers: int


class WorkQueue(Protocol):
    """Every method raises QueueUnavailable. `failures` counts how often one did."""

    @property
    def failures(self) -> int: ...

    async def add(self, work: Sequence[NewWork]) -> int:
        """Queue work; return how much of it was not in the queue already."""

    async def take(self, consumer: str, wanted: Wanted) -> list[QueueEntry]:
        """Hold the next entries. Tenants of a lane take turns."""

    async def wait(self, position: str, timeout_s: float) -> str:
        """Return once work was added after the position, or after a time; return the new position."""

    async def renew(self, consumer: str, entries: Sequence[QueueEntry], *, is_pull_worker: bool = False) -> Renewal:
        """Hold entries for longer."""

    async def claim(self, consumer: str, wanted: Wanted, idle_s: float, *, is_dead: bool = False) -> list[QueueEntry]:
        """Hold entries that their holders have not renewed for `idle_s`: those delivered fewer than MAX_DELIVERIES
        times, or with `is_dead` the others.
        """

    async def done(self, entries: Sequence[QueueEntry]) -> None:
        """The work has ended, and that is stored."""

    async def put_back(self, consumer: str, entries: Sequence[QueueEntry]) -> None:
        """Queue work again that was taken and not begun, or stopped in good order. Its deliveries do not count."""


def quoted(name: str) -> str:
    return quote(name, safe="")
