"""Whom to stop when a head that may preempt finds no room: jobs of preemptible lanes that can resume, least loss first.

Only where sequences or KV keep the head out of every worker it may use, because prefill is over soon anyway. Victims
are taken on one worker, no more than make room for the head. The head is promised that room and counted there at once,
so that nobody else takes it; it goes when enough of its worker is really free.
"""

from collections.abc import Collection, Iterable, Sequence
from heapq import nlargest
from itertools import islice

from inferry.domain.jobs import ResumeMode
from inferry.scheduling.batching.packing import WorkerState
from inferry.scheduling.queues.lane_queue import LaneQueue, RouteQueue
from inferry.scheduling.queues.queued_job import NOMINATED, READY, QueuedJob

MIN_PROGRESS_TOKENS = 32
MAX_PREEMPTIONS = 3
_MAX_EVICTIONS_PER_TICK = 64
_MAX_WORKERS = 4
_MAX_JOBS_PER_WORKER = 32
# Looking in vain is the dearest thing a tick can do: a queue that found nobody waits for so many rounds to look again.
_RETRY_ROUNDS = 8


class Preemption:
    """Decides evictions, and keeps the promises they were made for."""

    __slots__ = ("_lane_queues", "_rounds", "nominating_workers")

    def __init__(self, lane_queues: Sequence[LaneQueue]) -> None:
        preemptible = {lane_queue.lane for lane_queue in lane_queues if lane_queue.policy.preemptible}
        self._lane_queues = [
            lane_queue for lane_queue in lane_queues if preemptible.intersection(lane_queue.policy.may_preempt)
        ]
        self.nominating_workers: dict[WorkerState, None] = {}
        self._rounds = 0

    def ready_nominees(self, changed_workers: Collection[WorkerState]) -> Sequence[QueuedJob]:
        """Promised jobs whose room is free by now on workers that have changed, on each in the order of promises."""
        ready_nominees = []
        for worker in [worker for worker in changed_workers if worker in self.nominating_workers]:
            for entry in _fitting_nominees(worker):
                del worker.nominated[entry]
                ready_nominees.append(entry)
            if not worker.nominated:
                del self.nominating_workers[worker]
        return ready_nominees

    def revoke_nominations(self, worker: WorkerState) -> list[QueuedJob]:
        """What the worker is has changed, and so no promise on it holds any more."""
        revoked = list(worker.nominated)
        for entry in revoked:
            self.cancel(entry)
        return revoked

    def cancel(self, entry: QueuedJob) -> None:
        """A promised job no longer needs its room. Who was stopped for it is not called back."""
        worker = entry.worker
        assert worker is not None
        worker.undo_admit(entry)
        entry.worker = None
        entry.state = READY
        if not worker.nominated:
            self.nominating_workers.pop(worker, None)

    def select_victims(self) -> list[QueuedJob]:
        """Whom to stop for the heads that are blocked now."""
        evicted: list[QueuedJob] = []
        if not self._lane_queues:
            return evicted
        self._rounds += 1
        for lane_queue in self._lane_queues:
            for queue in tuple(lane_queue.waiting):
                if queue.no_preemption_before <= self._rounds:
                    self._select_victims_for(queue, evicted)
        return evicted

    def _select_victims_for(self, queue: RouteQueue, evicted: list[QueuedJob]) -> None:
        while len(evicted) < _MAX_EVICTIONS_PER_TICK and (head := queue.head()) is not None:
            found = _find_victims(head, queue.lane_queue)
            if found is None:
                queue.no_preemption_before = self._rounds + _RETRY_ROUNDS
                return
            worker, victims = found
            for victim in victims:
                worker.evicting[victim] = None
                worker.evicting_kv_tokens += victim.kv_tokens
                del worker.preemption_candidates[victim]
            evicted += victims
            self._nominate(head, worker)

    def _nominate(self, head: QueuedJob, worker: WorkerState) -> None:
        head.state = NOMINATED
        head.blocked = None
        head.run.job_left()
        head.queue.remove(head)
        head.worker = worker
        worker.admit(head)
        worker.nominated[head] = None
        self.nominating_workers[worker] = None


def _find_victims(head: QueuedJob, lane_queue: LaneQueue) -> tuple[WorkerState, list[QueuedJob]] | None:
    """The worker where least work is lost, and whom to stop there. None where that does not help or is not needed."""
    fill, workers = lane_queue.fill, head.queue.route.workers
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
        if (
            worker.has_prefill_capacity(head, lane_queue.fill)
            and (victims := _victims_on(worker, head, lane_queue)) is not None
        ):
            lost_tokens = sum(_lost_tokens(victim) for victim in victims)
            if best is None or lost_tokens < best[0]:
                best = lost_tokens, worker, victims
    return None if best is None else best[1:]


def _victims_on(worker: WorkerState, head: QueuedJob, lane_queue: LaneQueue) -> list[QueuedJob] | None:
    """The fewest jobs, cheapest first, whose end makes room for the head; nobody where those leaving are enough."""
    latest = islice(reversed(worker.preemption_candidates), _MAX_JOBS_PER_WORKER)
    evictable = [entry for entry in latest if entry.job.lane in lane_queue.policy.may_preempt and _is_evictable(entry)]
    evictable.sort(key=lambda entry: (_lost_tokens(entry), -entry.number))
    sequences, kv_tokens = len(worker.evicting), worker.evicting_kv_tokens
    victims: list[QueuedJob] = []
    for entry in evictable:
        if _fits_after(worker, head, lane_queue.fill, sequences, kv_tokens):
            break
        victims.append(entry)
        sequences += 1
        kv_tokens += entry.kv_tokens
    if not _fits_after(worker, head, lane_queue.fill, sequences, kv_tokens):
        return None
    for entry in tuple(reversed(victims)):  # spare those whom a larger one made unnecessary, dearest first
        if _fits_after(worker, head, lane_queue.fill, sequences - 1, kv_tokens - entry.kv_tokens):
            victims.remove(entry)
            sequences -= 1
            kv_tokens -= entry.kv_tokens
    return victims


def _fits_after(worker: WorkerState, head: QueuedJob, fill: float, sequences: int, kv_tokens: int) -> bool:
    """Whether the head fits once so much has left."""
    if worker.sequences - sequences >= worker.sequence_limit * fill:
        return False
    used, limit = worker.kv_tokens - kv_tokens, worker.kv_limit
    return used + head.kv_tokens <= limit * fill or (not used and limit > 0)


def _is_evictable(entry: QueuedJob) -> bool:
    """Before its first token a job that can resume at all loses only prefill; after it, it must have got somewhere."""
    job = entry.job
    if job.resume is ResumeMode.NEVER or job.preemptions >= MAX_PREEMPTIONS:
        return False
    return entry.prefill_tokens > 0 or (job.resume is not ResumeMode.RESTART and entry.produced >= MIN_PROGRESS_TOKENS)


def _lost_tokens(entry: QueuedJob) -> int:
    """Tokens computed that will have to be computed again, as far as is known."""
    if entry.prefill_tokens or entry.job.resume is ResumeMode.NATIVE:
        return 0
    return entry.charged_tokens + entry.produced


def _fitting_nominees(worker: WorkerState) -> Iterable[QueuedJob]:
    """Promised jobs that fit by now without those promised after them."""
    nominees = list(worker.nominated)
    sequences = worker.sequences - len(nominees)
    kv_tokens = worker.kv_tokens - sum(entry.kv_tokens for entry in nominees)
    for entry in nominees:
        fits_empty = not kv_tokens and worker.kv_limit > 0
        sequences += 1
        kv_tokens += entry.kv_tokens
        if sequences > worker.sequence_limit or (kv_tokens > worker.kv_limit and not fits_empty):
            return
        yield entry
