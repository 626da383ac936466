"""A fleet: workers that the same jobs may use. Finds the least loaded that has room, and keeps workers for who waits.

Loads are found out again only for workers that changed since somebody last asked.
"""

from collections.abc import Iterable, Sequence

from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.affinity import Circle
from inferry.scheduling.tickets import Ticket

_FULL = 1.0
SLACK = 0.25


class Fleet:
    """Some workers, by name. Routes that may use the same workers share one.

    `stale` are workers whose load has changed. `kv_limit` is the largest of its workers', or None since one changed.
    `overlapping` are other fleets with some of the same workers. `closed_in`
    is the walk in which all its workers are kept for somebody, `touched_in` one in which some of them are.
    """

    __slots__ = (
        "_counted",
        "_idle",
        "_kv_tokens",
        "_least_kv_tokens",
        "_least_part",
        "_loads",
        "_parts",
        "_roomy",
        "_sequences",
        "circle",
        "closed_in",
        "index",
        "kv_limit",
        "overlapping",
        "stale",
        "touched_in",
        "workers",
    )

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        self.workers = workers
        self.index = {worker: number for number, worker in enumerate(workers)}
        self.circle = Circle(workers)
        self.overlapping: list[Fleet] = []
        self.closed_in = self.touched_in = -1
        self._loads = [0.0] * len(workers)
        self._parts = [0.0] * len(workers)
        self._counted = [0] * len(workers)
        self._kv_tokens = [0] * len(workers)
        self._least_part: float | None = None
        self._least_kv_tokens: int | None = None
        self.kv_limit: float | None = None
        self._sequences = 0
        self._idle = len(workers)
        self._roomy = 0
        self.stale = list(workers)

    def least_loaded(self, ticket: Ticket, walk: int, fill: float) -> WorkerState | None:
        """The least loaded worker that takes the job into the part `fill` of its room; ties go by name.

        Workers that are closed in this walk take nobody.
        """
        if self.stale:
            self._weigh_again()
        loads = self._loads
        least = min(loads)
        # A worker that is full in any currency is not even worth asking.
        if least >= _FULL:
            return None
        worker = self.workers[loads.index(least)]
        if (self.touched_in != walk or self.is_open(worker, ticket, walk)) and worker.takes(ticket, fill):
            return worker
        if self.is_full(ticket.kv_tokens, fill):
            return None
        if self.touched_in == walk:
            return self.least_loaded_among(self.workers, ticket, walk, fill)
        return least_loaded_of(self.workers, ticket, fill)

    def least_loaded_among(
        self, workers: Iterable[WorkerState], ticket: Ticket, walk: int, fill: float
    ) -> WorkerState | None:
        """The same, among some workers."""
        mine = [
            worker
            for worker in workers
            if worker in self.index and (self.touched_in != walk or self.is_open(worker, ticket, walk))
        ]
        if len(mine) > 1:
            mine.sort(key=self.index.__getitem__)
        return least_loaded_of(mine, ticket, fill)

    def is_full(self, kv_tokens: int, fill: float) -> bool:
        """Whether no worker takes a job that needs so much KV into the part `fill` of its room. Cheap, and not always
        right when it says no.
        """
        if self.stale:
            self._weigh_again()
        limit = self.kv_limit
        if limit is None:
            limit = self.kv_limit = max([worker.kv_limit for worker in self.workers])
        # As a rule who had room has some: then nobody need find out who has most.
        number = self._roomy
        if self._parts[number] < fill and self._kv_tokens[number] + kv_tokens <= limit * fill:
            return False
        part = self._least_part
        if part is None:
            part = self._least_part = min(self._parts)
        if part >= fill:
            return True
        least = self._least_kv_tokens
        if least is None:
            least = self._least_kv_tokens = min(self._kv_tokens)
        self._roomy = self._kv_tokens.index(least)
        return least > 0 and least + kv_tokens > limit * fill

    def least(self) -> WorkerState:
        """The least loaded worker, whether or not it takes anybody."""
        if self.stale:
            self._weigh_again()
        return self.workers[self._loads.index(min(self._loads))]

    def has_idle(self) -> bool:
        """Whether some worker has nothing to do."""
        if self.stale:
            self._weigh_again()
        return self._idle > 0

    def fair_load(self) -> float:
        """How many sequences a worker may have before one more would be more than its part, slack included."""
        if self.stale:
            self._weigh_again()
        return (1.0 + SLACK) * (self._sequences + 1) / len(self.workers)

    def is_open(self, worker: WorkerState, ticket: Ticket, walk: int) -> bool:
        """Whether the worker is kept for nobody who keeps it from this job. Not to be asked of a closed fleet."""
        return self.touched_in != walk or worker.closed_in != walk or ticket.lane < worker.closed_from

    def close(self, walk: int) -> None:
        """Keep all its workers for the job that waits for them: nobody behind it may have them in this walk."""
        self.closed_in = walk
        if self.overlapping:
            for worker in self.workers:
                worker.closed_in = walk
                worker.closed_from = 0
            for other in self.overlapping:
                other.touched_in = walk

    def _weigh_again(self) -> None:
        """Write down what has changed. Who has least of something is looked up again only where it was one of those."""
        for worker in self.stale:
            number, load, sequences = self.index[worker], worker.load, worker.sequences
            self._loads[number] = worker.weigh() if load is None else load
            part, least_part = worker.part, self._least_part
            if least_part is not None:
                if part <= least_part:
                    self._least_part = part
                elif self._parts[number] <= least_part:
                    self._least_part = None
            self._parts[number] = part
            kv_tokens, least_kv_tokens = worker.kv_tokens, self._least_kv_tokens
            if least_kv_tokens is not None:
                if kv_tokens <= least_kv_tokens:
                    self._least_kv_tokens = kv_tokens
                elif self._kv_tokens[number] <= least_kv_tokens:
                    self._least_kv_tokens = None
            self._kv_tokens[number] = kv_tokens
            counted = self._counted[number]
            if counted != sequences:
                self._sequences += sequences - counted
                self._counted[number] = sequences
                if not sequences:
                    self._idle += 1
                elif not counted:
                    self._idle -= 1
        self.stale.clear()


def least_loaded_of(workers: Sequence[WorkerState], ticket: Ticket, fill: float) -> WorkerState | None:
    if len(workers) == 1:
        return workers[0] if workers[0].takes(ticket, fill) else None
    best, least = None, _FULL
    for worker in workers:
        load = load_of(worker)
        if load < least and worker.takes(ticket, fill):
            best, least = worker, load
    return best


def load_of(worker: WorkerState) -> float:
    return worker.weigh() if worker.load is None else worker.load


class Fleets:
    """All fleets there are, by their workers."""

    __slots__ = ("_fleets",)

    def __init__(self) -> None:
        self._fleets: dict[tuple[WorkerState, ...], Fleet] = {}

    def of(self, workers: tuple[WorkerState, ...]) -> Fleet:
        fleet = self._fleets.get(workers)
        if fleet is None:
            fleet = Fleet(workers)
            fleet.overlapping = [other for other in self._fleets.values() if not other.index.keys().isdisjoint(workers)]
            for other in fleet.overlapping:
                other.overlapping.append(fleet)
            for worker in workers:
                worker.fleets.append(fleet)
            self._fleets[workers] = fleet
        return fleet

    def clear(self) -> None:
        for fleet in self._fleets.values():
            for worker in fleet.workers:
                worker.fleets.clear()
        self._fleets.clear()
