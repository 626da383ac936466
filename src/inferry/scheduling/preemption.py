"""Whom to stop when a head that may preempt finds no room: jobs of preemptible lanes that can resume, least loss first.

Only where sequences or KV keep the head out of every worker it may use, because prefill is over soon anyway. Victims
are taken on one worker, no more than make room for the head. The head is promised that room and counted there at once,
so that nobody else takes it; it goes when enough of its worker is really free.
"""

from collections.abc import Iterable, Sequence
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
# Looking in vain is the dearest thing a tick can do, so a head that found nobody looks again only every so many walks.
_PATIENCE = 8


class Preemption:
    """Decides evictions, and keeps the promises they were made for."""

    __slots__ = ("_in_vain", "_lines", "_promising", "_walks")

    def __init__(self, lines: Sequence[Line]) -> None:
        preemptible = {line.lane for line in lines if line.policy.preemptible}
        self._lines = [line for line in lines if preemptible.intersection(line.policy.may_preempt)]
        self._promising: dict[WorkerState, None] = {}
        self._in_vain: dict[Queue, tuple[Ticket, int]] = {}
        self._walks = 0

    def kept(self) -> Sequence[Ticket]:
        """Promised jobs whose room is free by now, in the order of their promises."""
        if not self._promising:
            return ()
        kept = []
        for worker in tuple(self._promising):
            for ticket in _with_room(worker):
                del worker.promised[ticket]
                kept.append(ticket)
            if not worker.promised:
                del self._promising[worker]
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
            self._promising.pop(worker, None)

    def decide(self) -> list[Ticket]:
        """Whom to stop for the heads that are blocked now."""
        evicted: list[Ticket] = []
        if not self._lines:
            return evicted
        self._walks += 1
        for line in self._lines:
            for queue in tuple(line.waiting):
                while len(evicted) < _PER_TICK and (head := queue.head()) is not None:
                    asked, walk = self._in_vain.get(queue, (None, 0))
                    if asked is head and self._walks < walk + _PATIENCE:
                        break
                    found = _make_room(head, line)
                    if found is None:
                        self._in_vain[queue] = head, self._walks
                        break
                    worker, victims = found
                    for victim in victims:
                        victim.leaving = True
                        worker.leaving_sequences += 1
                        worker.leaving_kv_tokens += victim.kv_tokens
                        del worker.stoppable[victim]
                    evicted += victims
                    self._promise(head, worker)
        return evicted

    def _promise(self, head: Ticket, worker: WorkerState) -> None:
        head.stage = PROMISED
        head.queue.remove(head)
        head.worker = worker
        worker.take(head)
        worker.promised[head] = None
        self._promising[worker] = None


def _make_room(head: Ticket, line: Line) -> tuple[WorkerState, list[Ticket]] | None:
    """The worker where least work is lost, and whom to stop there. None where that does not help or is not needed."""
    workers = []
    for worker in head.queue.route.workers:
        if not worker.is_full_for(head, line.fill):
            return None
        if (worker.stoppable or worker.leaving_sequences) and not worker.pads:
            workers.append(worker)
    best: tuple[int, WorkerState, list[Ticket]] | None = None
    for worker in nlargest(_WORKERS, workers, key=lambda worker: len(worker.stoppable)):
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
    sequences, kv_tokens = worker.leaving_sequences, worker.leaving_kv_tokens
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
    if job.resume is Resume.NEVER or job.attempt > MAX_PREEMPTIONS:
        return False
    return not ticket.decoding or (job.resume is not Resume.RESTART and ticket.produced >= MIN_PROGRESS_TOKENS)


def _loss(ticket: Ticket) -> int:
    """Tokens computed that will have to be computed again, as far as is known."""
    if not ticket.decoding or ticket.job.resume is Resume.NATIVE:
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
