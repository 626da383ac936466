"""Who goes next: the heads of all queues, by lane and then in fair order, except where a lower lane is owed a turn."""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from inferry.domain.plans import ReleaseReason
from inferry.scheduling.billing import Billing
from inferry.scheduling.due import Agenda
from inferry.scheduling.flows import order
from inferry.scheduling.kin import Kin, mates
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.packing import Draft, WorkerState, write_down
from inferry.scheduling.passing import passers
from inferry.scheduling.placing.loads import close, keep_for_turn
from inferry.scheduling.placing.place import Placement
from inferry.scheduling.quantum import QUANTUM_TOKENS
from inferry.scheduling.shares import Shares
from inferry.scheduling.tickets import PLANNED, Ticket

_MAX_WAIT = ReleaseReason.MAX_WAIT
_SIBLING = ReleaseReason.SIBLING


class Boarding:
    """Moves ready jobs onto workers until nobody else can go.

    It walks the heads, best first. A head without room keeps the workers it waits for from everybody behind it, until
    the next walk: that is what stops small and lower-lane jobs from eating the room it needs. Only heads are looked
    at, so a walk costs what the number of queues costs, not the backlog.
    """

    __slots__ = ("_agenda", "_billing", "_blocked", "_drafts", "_lines", "_placement", "_shares", "_walk")

    def __init__(self, lines: Sequence[Line], agenda: Agenda, billing: Billing, placement: Placement) -> None:
        self._lines = lines
        self._agenda = agenda
        self._billing = billing
        self._placement = placement
        self._shares = Shares(lines)
        self._drafts: list[Draft] = []
        self._blocked: list[tuple[Ticket, list[WorkerState]]] = []
        self._walk = 0

    def fill_workers(self, promised: Sequence[Ticket] = ()) -> list[Draft]:
        """Send everybody who can go, those first for whom room was made. In the end nobody has both a place in the
        order and room.
        """
        self._drafts = []
        for ticket in promised:
            self._depart(ticket)
            write_down(ticket, self._drafts)
        while True:
            self._walk += 1
            self._blocked.clear()
            kept_for = self._serve_turns()
            self._serve_in_order(kept_for)
            if self._shares.turn() is kept_for and not self._let_pass():
                break
        for draft in self._drafts:
            draft.worker.drafts.clear()
        return self._drafts

    def _serve_turns(self) -> Queue | None:
        """Lower lanes that are owed go first. One that finds no room has a worker kept for it: return its queue.

        What is owed is paid out of the whole room, also out of what the lane leaves to higher ones otherwise.
        """
        while (queue := self._shares.turn()) is not None and (ticket := queue.head()) is not None:
            worker = self._placement.pick(queue.route, ticket, self._walk, 1.0)
            if worker is None:
                keep_for_turn(queue.route.workers, ticket, self._walk)
                break
            self._shares.takes_turn(queue, ticket.prefill_tokens)
            self._send(ticket, worker)
        return queue

    def _serve_in_order(self, kept_for: Queue | None) -> None:
        """Walk the heads to the end, or until another lower lane is owed a turn."""
        heads = [
            (line.lane, order(head), head)
            for line in self._lines
            for queue in line.waiting
            if (head := queue.head()) is not None
        ]
        heapify(heads)
        while heads:
            _, key, ticket = heads[0]
            queue = ticket.queue
            if ticket.tenant.at == key[0]:
                worker = self._placement.pick(queue.route, ticket, self._walk, queue.line.fill)
                if worker is None:
                    self._blocked.append((ticket, close(queue.route.workers, self._walk)))
                    heappop(heads)
                    continue
                if self._send_with_company(ticket, worker) and self._shares.turn() is not kept_for:
                    return
            # The queue has another head, or its tenant was served elsewhere.
            head = queue.head()
            if head is None:
                heappop(heads)
            else:
                heapreplace(heads, (queue.line.lane, order(head), head))

    def _let_pass(self) -> bool:
        """Let smaller jobs pass heads that no worker has room for; say whether somebody went."""
        for head, workers in self._blocked:
            for ticket, worker in passers(head, workers):
                self._send(ticket, worker, in_turn=False)
                return True
        return False

    def _send_with_company(self, ticket: Ticket, worker: WorkerState) -> bool:
        """Send the head of a queue and those who go along; say whether a lower lane may be due a turn for it."""
        kin = ticket.kin
        if worker.pads:
            due = self._send(ticket, worker)
            return self._fill_pass(ticket.queue, worker) or due
        if kin is None or kin.size == 1 or ticket.reason is _MAX_WAIT:
            return self._send(ticket, worker)
        return self._send_siblings(ticket, kin, worker)

    def _fill_pass(self, queue: Queue, worker: WorkerState) -> bool:
        """Fill the padded pass that was just opened with those who stand behind its first job."""
        due = False
        fill = queue.line.fill
        while (mate := queue.head()) and worker.has_room(mate, fill) and worker.is_forming_a_plan_for(mate):
            due |= self._send(mate, worker)
        return due

    def _send_siblings(self, ticket: Ticket, kin: Kin, worker: WorkerState) -> bool:
        """Send a job and its siblings in one plan, a quantum of them at most."""
        due = self._admit(ticket, worker)
        family, left = [ticket], QUANTUM_TOKENS
        for mate in mates(kin):
            if mate.reason is _MAX_WAIT or not self._placement.joins(mate, worker, ticket.queue.line.fill, left):
                break
            left -= mate.prefill_tokens
            due |= self._admit(mate, worker, in_turn=False)
            family.append(mate)
        for member in family:
            if len(family) > 1:
                member.reason = _SIBLING
            write_down(member, self._drafts)
        return due

    def _send(self, ticket: Ticket, worker: WorkerState, in_turn: bool = True) -> bool:
        """Move a ready job onto a worker and into a plan; say whether a lower lane may be due a turn for it."""
        due = self._admit(ticket, worker, in_turn)
        write_down(ticket, self._drafts)
        return due

    def _admit(self, ticket: Ticket, worker: WorkerState, in_turn: bool = True) -> bool:
        """Move a ready job from its queue onto a worker."""
        ticket.worker = worker
        worker.take(ticket)
        if in_turn:
            ticket.run.chosen()
        due = self._depart(ticket)
        ticket.queue.remove(ticket, in_turn)
        return due

    def _depart(self, ticket: Ticket) -> bool:
        """A job that its worker has taken counts as sent from here on."""
        line, worker = ticket.queue.line, ticket.worker
        assert worker is not None
        line.count(ticket, -1)
        line.drain.departed += 1
        if ticket.due is not None:
            self._agenda.drop(ticket)
        ticket.stage = PLANNED
        self._billing.sent(ticket)
        if ticket.job.prefix:
            self._placement.sent(ticket, worker)
        if line.policy.preemptible:
            worker.stoppable[ticket] = None
        return self._shares.admitted(line, ticket.prefill_tokens)
