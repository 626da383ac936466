"""Which running jobs to stop for a head that may preempt: jobs of preemptible lanes that can resume, least loss first.

Only where sequences or KV keep the head out of every worker it may use: prefill ends soon by itself. All victims run on
one worker, and no more are stopped than the head needs. Of its own lane, where the lane may preempt itself, only jobs
yield that have written far more than was predicted. The head is nominated for that worker and counted there at
once, so that no other job takes the capacity; it goes when enough of it is really free.
"""

from collections.abc import Collection, Iterable, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final

from inferry.domain.decisions import PREEMPTION
from inferry.domain.jobs import ResumeMode
from inferry.scheduling.queues.bound_interval import bound_by
from inferry.scheduling.queues.lane_queue import LaneQueue, RouteQueue
from inferry.scheduling.queues.queued_job import MAX_PREEMPTIONS, NOMINATED, READY, QueuedJob
from inferry.scheduling.worker_state import WorkerState

MIN_PROGRESS_TOKENS = 32
OVERRUN_FACTOR: Final = 2
"""A job yields to jobs of its own lane once it has written this many times the output that was predicted."""
_MAX_EVICTIONS_PER_TICK = 64
_MAX_WORKERS = 4
_MAX_JOBS_PER_WORKER = 32
# A search in vain is the most expensive part of a tick: after one, a queue waits this many rounds.
_RETRY_ROUNDS = 8


class Preemption:
    """Decides evictions, and nominates the jobs they were made for. `workers` are the scheduler's, by name."""

    __slots__ = ("_lane_queues", "_rounds", "_workers", "nominating_workers")

    def __init__(self, lane_queues: Sequence[LaneQueue], workers: dict[str, WorkerState]) -> None:
        self.use_lane_rules(lane_queues)
        self._workers = workers
        self.nominating_workers: dict[WorkerState, None] = {}
        self._rounds = 0

    def use_lane_rules(self, lane_queues: Sequence[LaneQueue]) -> None:
        """Follow which lanes may preempt others."""
        preemptible = {lane_queue.lane for lane_queue in lane_queues if lane_queue.rules.preemptible}
        self._lane_queues = [
            lane_queue for lane_queue in lane_queues if preemptible.intersection(lane_queue.rules.may_preempt)
        ]

    def ready_nominees(self, changed_workers: Collection[WorkerState]) -> Sequence[tuple[QueuedJob, WorkerState]]:
        """Nominated jobs that fit by now on workers that have changed, on each in the order of nomination."""
        ready_nominees = []
        for worker in [worker for worker in changed_workers if worker in self.nominating_workers]:
            for entry in _fitting_nominees(worker):
                del worker.nominated[entry]
                ready_nominees.append((entry, worker))
            if not worker.nominated:
                del self.nominating_workers[worker]
        return ready_nominees

    def revoke_nominations(self, worker: WorkerState) -> list[QueuedJob]:
        """The worker has changed, so no nomination on it holds any more."""
        revoked = list(worker.nominated)
        for entry in revoked:
            self.cancel(entry)
        return revoked

    def cancel(self, entry: QueuedJob) -> None:
        """A nominated job no longer needs the capacity. Evictions made for it are not undone."""
        assert entry.worker is not None
        worker = self._workers[entry.worker]
        worker.undo_admit(entry)
        entry.worker = None
        entry.state = READY
        if not worker.nominated:
            self.nominating_workers.pop(worker, None)

    def select_victims(self, now: float) -> list[QueuedJob]:
        """The jobs to stop for heads that are blocked now."""
        evicted: list[QueuedJob] = []
        if not self._lane_queues:
            return evicted
        self._rounds += 1
        for lane_queue in self._lane_queues:
            for queue in tuple(lane_queue.waiting):
                if queue.no_preemption_before <= self._rounds:
                    self._select_victims_for(queue, evicted, now)
        return evicted

    def _select_victims_for(self, queue: RouteQueue, evicted: list[QueuedJob], now: float) -> None:
        while len(evicted) < _MAX_EVICTIONS_PER_TICK and (head := queue.head()) is not None:
            found = _find_victims(head, queue)
            if found is None:
                queue.no_preemption_before = self._rounds + _RETRY_ROUNDS
                return
            worker, victims = found
            for victim in victims:
                worker.evict(victim)
            evicted += victims
            self._nominate(head, queue, worker, now)

    def _nominate(self, head: QueuedJob, queue: RouteQueue, worker: WorkerState, now: float) -> None:
        head.state = NOMINATED
        head.blocked = None
        head.run.job_left()
        queue.remove(head)
        head.bound = bound_by(head.bound, PREEMPTION, worker.name, now)
        head.picked_by = PREEMPTION
        head.worker = worker.name
        worker.admit(head)
        worker.nominated[head] = None
        self.nominating_workers[worker] = None


def _find_victims(head: QueuedJob, queue: RouteQueue) -> tuple[WorkerState, list[QueuedJob]] | None:
    """The worker where least work is lost, and the jobs to stop there; None where that is no help or no need."""
    fill, workers = queue.rules.fill, queue.route.workers
    for worker in workers:
        if not worker.is_full_for(head, fill):
            return None
    ranked = [
        (len(worker.preemption_candidates), -number)
        for number, worker in enumerate(workers)
        if (worker.preemption_candidates or worker.evicting) and not worker.pads
    ]
    best: tuple[int, WorkerState, list[QueuedJob]] | None = None
    for _, number in nlargest(_MAX_WORKERS, ranked):
        worker = workers[-number]
        if worker.has_prefill_capacity(head, fill) and (victims := _victims_on(worker, head)) is not None:
            lost_tokens = sum(_lost_tokens(victim) for victim in victims)
            if best is None or lost_tokens < best[0]:
                best = lost_tokens, worker, victims
    return None if best is None else best[1:]


def _victims_on(worker: WorkerState, head: QueuedJob) -> list[QueuedJob] | None:
    """The fewest jobs, cheapest first, whose end lets the head in; none where earlier evictions are enough."""
    latest = islice(reversed(worker.preemption_candidates), _MAX_JOBS_PER_WORKER)
    fill, may_preempt = head.rules.fill, head.rules.may_preempt
    evictable = [
        entry
        for entry in latest
        if entry.job.lane in may_preempt and _is_evictable(entry) and (entry.lane != head.lane or _has_overrun(entry))
    ]
    evictable.sort(key=lambda entry: (_lost_tokens(entry), -entry.number))
    sequences, kv_tokens = len(worker.evicting), worker.evicting_kv_tokens
    victims: list[QueuedJob] = []
    for entry in evictable:
        if _fits_after(worker, head, fill, sequences, kv_tokens, victims):
            break
        victims.append(entry)
        sequences += 1
        kv_tokens += entry.kv_tokens
    if not _fits_after(worker, head, fill, sequences, kv_tokens, victims):
        return None
    for entry in tuple(reversed(victims)):  # spare jobs that a larger one made unnecessary, most expensive first
        spared = [victim for victim in victims if victim is not entry]
        if _fits_after(worker, head, fill, sequences - 1, kv_tokens - entry.kv_tokens, spared):
            victims = spared
            sequences -= 1
            kv_tokens -= entry.kv_tokens
    return victims


def _fits_after(
    worker: WorkerState, head: QueuedJob, fill: float, sequences: int, kv_tokens: int, victims: list[QueuedJob]
) -> bool:
    """Whether the head fits once that much has left: the victims, and the jobs that are being evicted."""
    left = worker.sequences - sequences
    if left >= worker.sequence_limit * fill or (left >= worker.batch_limit and not head.rules.is_live):
        return False
    if worker.kv_peaks is not None:
        return worker.fits_timed(worker.kv_peaks, head, fill, {*worker.evicting, *victims})
    used, limit = worker.kv_tokens - kv_tokens, worker.kv_limit
    return used + head.kv_tokens <= limit * fill or (not used and limit > 0)


def _is_evictable(entry: QueuedJob) -> bool:
    """Before its first token a job that can resume loses only prefill. After it, the job must have made progress."""
    job = entry.job
    if job.preemptions >= MAX_PREEMPTIONS:
        return False
    return entry.prefill_tokens > 0 or (job.resume is ResumeMode.CONTINUE and entry.produced >= MIN_PROGRESS_TOKENS)


def _has_overrun(entry: QueuedJob) -> bool:
    return entry.produced > OVERRUN_FACTOR * entry.job.footprint.output.expected


def _lost_tokens(entry: QueuedJob) -> int:
    """Tokens that have to be computed again."""
    return 0 if entry.prefill_tokens else entry.charged_tokens + entry.produced


def _fitting_nominees(worker: WorkerState) -> Iterable[QueuedJob]:
    """Nominated jobs that fit by now without those nominated after them."""
    nominees = list(worker.nominated)
    sequences = worker.sequences - len(nominees)
    kv_tokens = worker.kv_tokens - sum(entry.kv_tokens for entry in nominees)
    kv_peaks = worker.kv_peaks
    for number, entry in enumerate(nominees):
        if kv_peaks is not None and not worker.fits_timed(kv_peaks, entry, 1.0, set(nominees[number:])):
            return
        fits_empty = not kv_tokens and worker.kv_limit > 0
        sequences += 1
        kv_tokens += entry.kv_tokens
        if sequences > worker.sequence_limit or (kv_tokens > worker.kv_limit and not fits_empty):
            return
        yield entry
