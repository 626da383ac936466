"""A fleet: workers that the same jobs may use. Finds the least loaded that has room, and keeps workers for who waits.

Loads are found out again only for workers that changed since somebody last asked.
"""

from collections.abc import Iterable, Sequence

from inferry.scheduling.batching.packing import WorkerState
from inferry.scheduling.placement.rendezvous_hash import RendezvousHash
from inferry.scheduling.queues.queued_job import QueuedJob

_FULL = 1.0
LOAD_SLACK = 0.25


class WorkerGroup:
    """Some workers, by name. Routes that may use the same workers share one.

    `stale` are workers whose load has changed. `kv_limit` is the largest of its workers', or None since one changed.
    `overlapping` are other fleets with some of the same workers. `closed_in_walk`
    is the walk in which all its workers are kept for somebody, `touched_in_walk` one in which some of them are.
    """

    __slots__ = (
        "_counted",
        "_idle",
        "_kv_tokens",
        "_loads",
        "_min_kv_tokens",
        "_min_used_fraction",
        "_sequences",
        "_spare_worker",
        "_used_fractions",
        "closed_in_walk",
        "index",
        "kv_limit",
        "overlapping",
        "rendezvous",
        "stale",
        "touched_in_walk",
        "workers",
    )

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        self.workers = workers
        self.index = {worker: number for number, worker in enumerate(workers)}
        self.rendezvous = RendezvousHash(workers)
        self.overlapping: list[WorkerGroup] = []
        self.closed_in_walk = self.touched_in_walk = -1
        self._loads = [0.0] * len(workers)
        self._used_fractions = [0.0] * len(workers)
        self._counted = [0] * len(workers)
        self._kv_tokens = [0] * len(workers)
        self._min_used_fraction: float | None = None
        self._min_kv_tokens: int | None = None
        self.kv_limit: float | None = None
        self._sequences = 0
        self._idle = len(workers)
        self._spare_worker = 0
        self.stale = list(workers)

    def least_loaded(self, entry: QueuedJob, walk: int, fill: float) -> WorkerState | None:
        """The least loaded worker that takes the job into the part `fill` of its room; ties go by name.

        Workers that are closed in this walk take nobody.
        """
        if self.stale:
            self._refresh_loads()
        loads = self._loads
        least = min(loads)
        # A worker that is full in any currency is not even worth asking.
        if least >= _FULL:
            return None
        worker = self.workers[loads.index(least)]
        if (self.touched_in_walk != walk or self.is_open(worker, entry, walk)) and worker.accepts(entry, fill):
            return worker
        if self.is_full(entry.kv_tokens, fill):
            return None
        if self.touched_in_walk == walk:
            return self.least_loaded_among(self.workers, entry, walk, fill)
        return least_loaded_of(self.workers, entry, fill)

    def least_loaded_among(
        self, workers: Iterable[WorkerState], entry: QueuedJob, walk: int, fill: float
    ) -> WorkerState | None:
        """The same, among some workers."""
        members = [
            worker
            for worker in workers
            if worker in self.index and (self.touched_in_walk != walk or self.is_open(worker, entry, walk))
        ]
        if len(members) > 1:
            members.sort(key=self.index.__getitem__)
        return least_loaded_of(members, entry, fill)

    def is_full(self, kv_tokens: int, fill: float) -> bool:
        """Whether no worker takes a job that needs so much KV into the part `fill` of its room. Cheap, and not always
        right when it says no.
        """
        if self.stale:
            self._refresh_loads()
        limit = self.kv_limit
        if limit is None:
            limit = self.kv_limit = max([worker.kv_limit for worker in self.workers])
        # As a rule who had room has some: then nobody need find out who has most.
        number = self._spare_worker
        if self._used_fractions[number] < fill and self._kv_tokens[number] + kv_tokens <= limit * fill:
            return False
        used_fraction = self._min_used_fraction
        if used_fraction is None:
            used_fraction = self._min_used_fraction = min(self._used_fractions)
        if used_fraction >= fill:
            return True
        least = self._min_kv_tokens
        if least is None:
            least = self._min_kv_tokens = min(self._kv_tokens)
        self._spare_worker = self._kv_tokens.index(least)
        return least > 0 and least + kv_tokens > limit * fill

    def least(self) -> WorkerState:
        """The least loaded worker, whether or not it takes anybody."""
        if self.stale:
            self._refresh_loads()
        return self.workers[self._loads.index(min(self._loads))]

    def has_idle(self) -> bool:
        """Whether some worker has nothing to do."""
        if self.stale:
            self._refresh_loads()
        return self._idle > 0

    def fair_load(self) -> float:
        """How many sequences a worker may have before one more would be more than its part, slack included."""
        if self.stale:
            self._refresh_loads()
        return (1.0 + LOAD_SLACK) * (self._sequences + 1) / len(self.workers)

    def is_open(self, worker: WorkerState, entry: QueuedJob, walk: int) -> bool:
        """Whether the worker is kept for nobody who keeps it from this job. Not to be asked of a closed fleet."""
        return self.touched_in_walk != walk or worker.closed_in_walk != walk or entry.lane < worker.closed_from_lane

    def close(self, walk: int) -> None:
        """Keep all its workers for the job that waits for them: nobody behind it may have them in this walk."""
        self.closed_in_walk = walk
        if self.overlapping:
            for worker in self.workers:
                worker.closed_in_walk = walk
                worker.closed_from_lane = 0
            for other in self.overlapping:
                other.touched_in_walk = walk

    def _refresh_loads(self) -> None:
        """Write down what has changed. Who has least of something is looked up again only where it was one of those."""
        for worker in self.stale:
            number, load, sequences = self.index[worker], worker.load, worker.sequences
            self._loads[number] = worker.compute_load() if load is None else load
            used_fraction, min_used_fraction = worker.used_fraction, self._min_used_fraction
            if min_used_fraction is not None:
                if used_fraction <= min_used_fraction:
                    self._min_used_fraction = used_fraction
                elif self._used_fractions[number] <= min_used_fraction:
                    self._min_used_fraction = None
            self._used_fractions[number] = used_fraction
            kv_tokens, min_kv_tokens = worker.kv_tokens, self._min_kv_tokens
            if min_kv_tokens is not None:
                if kv_tokens <= min_kv_tokens:
                    self._min_kv_tokens = kv_tokens
                elif self._kv_tokens[number] <= min_kv_tokens:
                    self._min_kv_tokens = None
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


def least_loaded_of(workers: Sequence[WorkerState], entry: QueuedJob, fill: float) -> WorkerState | None:
    if len(workers) == 1:
        return workers[0] if workers[0].accepts(entry, fill) else None
    best, least = None, _FULL
    for worker in workers:
        load = load_of(worker)
        if load < least and worker.accepts(entry, fill):
            best, least = worker, load
    return best


def load_of(worker: WorkerState) -> float:
    return worker.compute_load() if worker.load is None else worker.load


class WorkerGroupIndex:
    """All fleets there are, by their workers."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[tuple[WorkerState, ...], WorkerGroup] = {}

    def of(self, workers: tuple[WorkerState, ...]) -> WorkerGroup:
        worker_group = self._groups.get(workers)
        if worker_group is None:
            worker_group = WorkerGroup(workers)
            worker_group.overlapping = [
                other for other in self._groups.values() if not other.index.keys().isdisjoint(workers)
            ]
            for other in worker_group.overlapping:
                other.overlapping.append(worker_group)
            for worker in workers:
                worker.worker_groups.append(worker_group)
            self._groups[workers] = worker_group
        return worker_group

    def clear(self) -> None:
        for worker_group in self._groups.values():
            for worker in worker_group.workers:
                worker.worker_groups.clear()
        self._groups.clear()
