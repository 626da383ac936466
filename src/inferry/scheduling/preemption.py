"""Whom to stop when a head that may preempt finds no room: jobs of preemptible lanes that can resume, least loss first.

Only where sequences or KV keep the head out of every worker it may use, because prefill is over soon anyway. Victims
are taken on one worker, no more than make room for the head. The head is promised that room and counted there at once,
so that nobody else takes it; it goes when enough of its worker is really free.
"""

from collections.abc import Collection, Iterable, Sequence
from heapq import nlargest
from itertools import islice

from inferry.domain.jobs import Resume
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.packing import WorkerState
from inferry.scheduling.tickets import PROMISED, READY, Ticket

MIN_PROGRESS_TOKENS = 32
MAX_PREEMPTIONS = 3
_PER_TICK = 64
_WORKERS = 4
_JOBS_PER_WORKER = 32
# Looking in vain is the dearest thing a tick can do: a queue that found nobody waits for so many rounds to look again.
_PATIENCE = 8


class Preemption:
    """Decides evictions, and keeps the promises they were made for."""

    __slots__ = ("_lines", "_rounds", "promising")

    def __init__(self, lines: Sequence[Line]) -> None:
        preemptible = {line.lane for line in lines if line.policy.preemptible}
        self._lines = [line for line in lines if preemptible.intersection(line.policy.may_preempt)]
        self.promising: dict[WorkerState, None] = {}
        self._rounds = 0

    def kept(self, changed: Collection[WorkerState]) -> Sequence[Ticket]:
        """Promised jobs whose room is free by now on workers that have changed, on each in the order of promises."""
        kept = []
        for worker in [worker for worker in changed if worker in self.promising]:
            for ticket in _with_room(worker):
                del worker.promised[ticket]
                kept.append(ticket)
            if not worker.promised:
                del self.promising[worker]
        return kept

    def take_back(self, worker: WorkerState) -> list[Ticket]:
        """What the worker is has changed, and so no promise on it holds any more."""
        broken = list(worker.promised)
        for ticket in broken:
            self.cancel(ticket)
        return broken

    def cancel(self, ticket: Ticket) -> None:
        """A promised job no longer needs its room. Who was stopped for it is not called back."""
        worker = ticket.worker
        assert worker is not None
        worker.give_up(ticket)
        ticket.worker = None
        ticket.stage = READY
        if not worker.promised:
            self.promising.pop(worker, None)

    def decide(self) -> list[Ticket]:
        """Whom to stop for the heads that are blocked now."""
        evicted: list[Ticket] = []
        if not self._lines:
            return evicted
        self._rounds += 1
        for line in self._lines:
            for queue in tuple(line.waiting):
                if queue.no_victims_before <= self._rounds:
                    self._decide_for(queue, evicted)
        return evicted

    def _decide_for(self, queue: Queue, evicted: list[Ticket]) -> None:
        while len(evicted) < _PER_TICK and (head := queue.head()) is not None:
            found = _make_room(head, queue.line)
            if found is None:
                queue.no_victims_before = self._rounds + _PATIENCE
                return
            worker, victims = found
            for victim in victims:
                worker.leaving[victim] = None
                worker.leaving_kv_tokens += victim.kv_tokens
                del worker.stoppable[victim]
            evicted += victims
            self._promise(head, worker)

    def _promise(self, head: Ticket, worker: WorkerState) -> None:
        head.stage = PROMISED
        head.wait = None
        head.run.left()
        head.queue.remove(head)
        head.worker = worker
        worker.take(head)
        worker.promised[head] = None
        self.promising[worker] = None


def _make_room(head: Ticket, line: Line) -> tuple[WorkerState, list[Ticket]] | None:
    """The worker where least work is lost, and whom to stop there. None where that does not help or is not needed."""
    fill, workers = line.fill, head.queue.route.workers
    for worker in workers:
        if not worker.is_full_for(head, fill):
            return None
    ranked = [
        (len(worker.stoppable), -number)
        for number, worker in enumerate(workers)
        if (worker.stoppable or worker.leaving) and not worker.pads
    ]
    best: tuple[int, WorkerState, list[Ticket]] | None = None
    for _, number in nlargest(_WORKERS, ranked):
        worker = workers[-number]
        if worker.has_prefill_room(head, line.fill) and (victims := _victims(worker, head, line)) is not None:
            lost = sum(_loss(victim) for victim in victims)
            if best is None or lost < best[0]:
                best = lost, worker, victims
    return None if best is None else best[1:]


def _victims(worker: WorkerState, head: Ticket, line: Line) -> list[Ticket] | None:
    """The fewest jobs, cheapest first, whose end makes room for the head; nobody where those leaving are enough."""
    latest = islice(reversed(worker.stoppable), _JOBS_PER_WORKER)
    may_stop = [ticket for ticket in latest if ticket.job.lane in line.policy.may_preempt and _may_stop(ticket)]
    may_stop.sort(key=lambda ticket: (_loss(ticket), -ticket.number))
    sequences, kv_tokens = len(worker.leaving), worker.leaving_kv_tokens
    victims: list[Ticket] = []
    for ticket in may_stop:
        if _is_enough(worker, head, line.fill, sequences, kv_tokens):
            break
        victims.append(ticket)
        sequences += 1
        kv_tokens += ticket.kv_tokens
    if not _is_enough(worker, head, line.fill, sequences, kv_tokens):
        return None
    for ticket in tuple(reversed(victims)):  # spare those whom a larger one made unnecessary, dearest first
        if _is_enough(worker, head, line.fill, sequences - 1, kv_tokens - ticket.kv_tokens):
            victims.remove(ticket)
            sequences -= 1
            kv_tokens -= ticket.kv_tokens
    return victims


def _is_enough(worker: WorkerState, head: Ticket, fill: float, sequences: int, kv_tokens: int) -> bool:
    """Whether the head fits once so much has left."""
    if worker.sequences - sequences >= worker.sequence_limit * fill:
        return False
    used, limit = worker.kv_tokens - kv_tokens, worker.kv_limit
    return used + head.kv_tokens <= limit * fill or (not used and limit > 0)


def _may_stop(ticket: Ticket) -> bool:
    """Before its first token a job that can resume at all loses only prefill; after it, it must have got somewhere."""
    job = ticket.job
    if job.resume is Resume.NEVER or job.preemptions >= MAX_PREEMPTIONS:
        return False
    return ticket.prefill_tokens > 0 or (job.resume is not Resume.RESTART and ticket.produced >= MIN_PROGRESS_TOKENS)


def _loss(ticket: Ticket) -> int:
    """Tokens computed that will have to be computed again, as far as is known."""
    if ticket.prefill_tokens or ticket.job.resume is Resume.NATIVE:
        return 0
    return ticket.charged + ticket.produced


def _with_room(worker: WorkerState) -> Iterable[Ticket]:
    """Promised jobs that fit by now without those promised after them."""
    later = list(worker.promised)
    sequences = worker.sequences - len(later)
    kv_tokens = worker.kv_tokens - sum(ticket.kv_tokens for ticket in later)
    for ticket in later:
        alone = not kv_tokens and worker.kv_limit > 0
        sequences += 1
        kv_tokens += ticket.kv_tokens
        if sequences > worker.sequence_limit or (kv_tokens > worker.kv_limit and not alone):
            return
        yield ticket
