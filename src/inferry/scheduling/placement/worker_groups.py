"""Workers that the same jobs may use: which is least loaded, and which are reserved.

Loads are computed again only for workers that changed since the last look.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from inferry.scheduling.placement.rendezvous_hash import RendezvousHash
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.worker_state import WorkerSet, WorkerState

_FULL: Final = 1.0
LOAD_SLACK: Final = 0.25


class WorkerGroup(WorkerSet):
    """Workers in the order of their names. Routes with the same workers share one group.

    `overlapping` are other groups with some of the same workers. In walk `closed_in_walk` all workers are reserved for
    a blocked job.
    """

    __slots__ = (
        "_counted",
        "_idle",
        "_kv_tokens",
        "_least_number",
        "_loads",
        "_min_kv_tokens",
        "_min_used_fraction",
        "_sequences",
        "_spare_worker",
        "_used_fractions",
        "closed_in_walk",
        "index",
        "overlapping",
        "rendezvous",
        "workers",
    )

    def __init__(self, workers: tuple[WorkerState, ...]) -> None:
        super().__init__(list(workers))
        self.workers = workers
        self.index = {worker: number for number, worker in enumerate(workers)}
        self.rendezvous = RendezvousHash(workers)
        self.overlapping: list[WorkerGroup] = []
        self.closed_in_walk = 0
        self._loads = [0.0] * len(workers)
        self._used_fractions = [0.0] * len(workers)
        self._counted = [0] * len(workers)
        self._kv_tokens = [0] * len(workers)
        self._least_number: int | None = None
        self._min_used_fraction: float | None = None
        self._min_kv_tokens: int | None = None
        self._sequences = 0
        self._idle = len(workers)
        self._spare_worker = 0

    def least_loaded(self, entry: QueuedJob, walk: int, fill: float) -> WorkerState | None:
        """The least loaded worker that accepts the job into the part `fill` of its capacity; ties go by name."""
        worker = self.least()
        if load_of(worker) >= _FULL:
            return None
        if (self.touched_in_walk != walk or self.is_open(worker, entry, walk)) and worker.accepts(
            entry, entry.prefill_tokens, fill
        ):
            return worker
        if self.is_full(entry.kv_tokens, fill):
            return None
        if self.touched_in_walk == walk:
            return self.least_loaded_among(self.workers, entry, walk, fill)
        return least_loaded_of(self.workers, entry, fill)

    def least_loaded_among(
        self, workers: Iterable[WorkerState], entry: QueuedJob, walk: int, fill: float
    ) -> WorkerState | None:
        """The same, among some of the workers."""
        members = [
            worker
            for worker in workers
            if worker in self.index and (self.touched_in_walk != walk or self.is_open(worker, entry, walk))
        ]
        if len(members) > 1:
            members.sort(key=self.index.__getitem__)
        return least_loaded_of(members, entry, fill)

    def is_full(self, kv_tokens: int, fill: float) -> bool:
        """Whether certainly no worker accepts a job with that much KV into the part `fill` of its capacity."""
        if self.stale:
            self._refresh_loads()
        limit = self.kv_limit
        if limit is None:
            limit = self.kv_limit = max([worker.kv_limit for worker in self.workers])
        # The worker that had spare KV before mostly still has: then no minimum is computed.
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
        """The least loaded worker, full or not; of equals the first by name."""
        if self.stale:
            self._refresh_loads()
        number = self._least_number
        if number is None:
            number = self._least_number = self._loads.index(min(self._loads))
        return self.workers[number]

    def has_idle(self) -> bool:
        """Whether some worker has no sequence."""
        if self.stale:
            self._refresh_loads()
        return self._idle > 0

    def fair_load(self) -> float:
        """The sequences a worker may have before one more exceeds its part by `LOAD_SLACK`."""
        if self.stale:
            self._refresh_loads()
        return (1.0 + LOAD_SLACK) * (self._sequences + 1) / len(self.workers)

    def is_open(self, worker: WorkerState, entry: QueuedJob, walk: int) -> bool:
        """Whether the worker is not reserved, or not from this job's lane. The group is not closed."""
        return self.touched_in_walk != walk or worker.closed_in_walk != walk or entry.lane < worker.closed_from_lane

    def close(self, walk: int) -> None:
        """Reserve all workers for a blocked job until the end of the walk."""
        self.closed_in_walk = walk
        if self.overlapping:
            for worker in self.workers:
                worker.closed_in_walk = walk
                worker.closed_from_lane = 0
            for other in self.overlapping:
                other.touched_in_walk = walk

    def _refresh_loads(self) -> None:
        """Note what changed. A minimum is computed again only where it was a stale worker's."""
        for worker in self.stale:
            number, sequences = self.index[worker], worker.sequences
            self._note_load(number, load_of(worker))
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

    def _note_load(self, number: int, load: float) -> None:
        """Note the load of a worker. The least loaded one is searched for again only where its own load rises."""
        least = self._least_number
        if least is not None:
            least_load = self._loads[least]
            if number == least:
                if load > least_load:
                    self._least_number = None
            elif load < least_load or (load == least_load and number < least):
                self._least_number = number
        self._loads[number] = load


def least_loaded_of(workers: Sequence[WorkerState], entry: QueuedJob, fill: float) -> WorkerState | None:
    if len(workers) == 1:
        return workers[0] if workers[0].accepts(entry, entry.prefill_tokens, fill) else None
    best, least = None, _FULL
    for worker in workers:
        load = load_of(worker)
        if load < least and worker.accepts(entry, entry.prefill_tokens, fill):
            best, least = worker, load
    return best


def load_of(worker: WorkerState) -> float:
    return worker.compute_load() if worker.load is None else worker.load


class WorkerGroupIndex:
    """All groups, by their workers."""

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
                worker.worker_sets.append(worker_group)
            self._groups[workers] = worker_group
        return worker_group

    def clear(self) -> None:
        for worker_group in self._groups.values():
            for worker in worker_group.workers:
                worker.worker_sets.clear()
        self._groups.clear()
