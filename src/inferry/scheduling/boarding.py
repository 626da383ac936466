"""Who goes next: the heads of all queues, by lane and then in fair order, except where a lower lane is owed a turn."""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from inferry.domain.lanes import ReleaseReason
from inferry.scheduling.due import Agenda
from inferry.scheduling.flows import order
from inferry.scheduling.keeping import keep_for_turn
from inferry.scheduling.kin import Kin, mates
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.pacing import Beat
from inferry.scheduling.packing import Draft, WorkerState, write_down
from inferry.scheduling.passing import passers
from inferry.scheduling.placing.place import Placement
from inferry.scheduling.quantum import QUANTUM_TOKENS
from inferry.scheduling.shares import Shares
from inferry.scheduling.tickets import PLANNED, Ticket, Wait

_MAX_WAIT = ReleaseReason.MAX_WAIT
_SIBLING = ReleaseReason.SIBLING


class Boarding:
    """Moves ready jobs onto workers until nobody else can go.

    A round of planning is one or more walks over the heads, best first. A head without room keeps the workers it waits
    for from everybody behind it, until the next walk: that is what stops small and lower-lane jobs from eating the room
    it needs. Only heads are looked at, so a walk costs what the number of queues costs, not the backlog.

    `changed` are the workers that may have got room since the last round. A head that found none then need not be
    tried elsewhere now: a worker that did not change has no more room for it than it had. (`looks_everywhere` does
    without that, to compare: it must decide the same.)
    """

    __slots__ = (
        "_agenda",
        "_beat",
        "_blocked",
        "_drafts",
        "_lines",
        "_placement",
        "_round",
        "_shares",
        "_walk",
        "changed",
        "looks_everywhere",
    )

    def __init__(self, lines: Sequence[Line], agenda: Agenda, placement: Placement, beat: Beat) -> None:
        self._lines = lines
        self._agenda = agenda
        self._placement = placement
        self._beat = beat
        self._shares = Shares(lines)
        self._drafts: list[Draft] = []
        self._blocked: list[Ticket] = []
        self._round = 0
        self._walk = 0
        self.changed: dict[WorkerState, None] = {}
        self.looks_everywhere = False

    def fill_workers(self, promised: Sequence[Ticket] = ()) -> list[Draft]:
        """Send everybody who can go, those first for whom room was made. In the end nobody has both a place in the
        order and room.
        """
        drafts = self._drafts = []
        self._round += 1
        for ticket in promised:
            worker = ticket.worker
            assert worker is not None
            self._depart(ticket, worker)
            ticket.run.charge(ticket.charged)
            self._shares.admitted(ticket.queue.line, ticket.charged)
            write_down(ticket, worker, drafts)
        while True:
            self._walk += 1
            self._blocked.clear()
            self._shares.start()
            kept_for = self._serve_turns()
            self._serve_in_order(kept_for)
            if self._shares.turn() is kept_for and not self._let_pass():
                break
        for draft in drafts:
            draft.worker.drafts.clear()
        self.changed.clear()
        return drafts

    def forget_waits(self) -> None:
        """Workers came or went, or nobody waits: whoever does from now on has to look everywhere first."""
        self._round += 1
        self.changed.clear()

    # In which order.

    def _serve_turns(self) -> Queue | None:
        """Lower lanes that are owed go first. One that finds no room has a worker kept for it: return its queue.

        What is owed is paid out of the whole room, also out of what the lane leaves to higher ones otherwise.
        """
        while (queue := self._shares.turn()) is not None and (ticket := queue.head()) is not None:
            worker = self._place(ticket, 1.0)
            if worker is None:
                assert ticket.wait is not None
                keep_for_turn(ticket, ticket.wait, self._walk)
                break
            self._shares.takes_turn(queue, ticket.prefill_tokens)
            self._send(ticket, worker)
        return queue

    def _serve_in_order(self, kept_for: Queue | None) -> None:
        """Walk the heads to the end, or until another lower lane is owed a turn."""
        for line in self._lines:
            if len(line.waiting) == 1:
                (queue,) = line.waiting
                if not queue.route.is_closed(self._walk) and self._serve_queue(queue, kept_for):
                    return
            elif line.waiting and self._serve_queues(line, kept_for):
                return

    def _serve_queue(self, queue: Queue, kept_for: Queue | None) -> bool:
        """Send from the only queue of a lane; say whether another lower lane is owed a turn for it."""
        fill, now = queue.line.fill, self._beat.now
        while (head := queue.head()) is not None:
            ticket = queue.goes_now(head, now)
            worker = None if queue is kept_for else self._place(ticket, fill)
            if worker is None:
                self._block(ticket)
                return False
            if ticket is not head:
                if self._send(ticket, worker, in_turn=False) and self._shares.turn() is not kept_for:
                    return True
            elif worker.pads or ticket.kin is not None:
                if self._send_with_company(ticket, worker) and self._shares.turn() is not kept_for:
                    return True
            elif self._send(ticket, worker) and self._shares.turn() is not kept_for:
                return True
        return False

    def _serve_queues(self, line: Line, kept_for: Queue | None) -> bool:
        """The same, from all queues of a lane."""
        heads = [(order(head), head) for queue in line.waiting if (head := queue.head()) is not None]
        heapify(heads)
        while heads:
            key, first = heads[0]
            queue = first.queue
            if queue.route.is_closed(self._walk):
                heappop(heads)
                continue
            if first.run.tenant.at == key[0]:
                ticket = queue.goes_now(first, self._beat.now)
                worker = None if queue is kept_for else self._place(ticket, line.fill)
                if worker is None:
                    self._block(ticket)
                    heappop(heads)
                    continue
                if ticket is not first:
                    due = self._send(ticket, worker, in_turn=False)
                else:
                    due = self._send_with_company(ticket, worker)
                if due and self._shares.turn() is not kept_for:
                    return True
            # The queue has another head, or its tenant was served elsewhere.
            head = queue.head()
            if head is None:
                heappop(heads)
            else:
                heapreplace(heads, (order(head), head))
        return False

    def _let_pass(self) -> bool:
        """Let smaller jobs pass heads that no worker has room for; say whether somebody went."""
        for head in self._blocked:
            queue, wait = head.queue, head.wait
            if queue.size > 1 and wait is not None:
                is_new = queue.blocked_since == self._round
                for ticket, worker in passers(head, wait, queue.route.workers if is_new else tuple(self.changed)):
                    self._send(ticket, worker, in_turn=False)
                    return True
        return False

    # Where, or nowhere.

    def _place(self, ticket: Ticket, fill: float) -> WorkerState | None:
        """A worker for the head of a queue. One that has looked everywhere in vain looks only at what has changed."""
        beat, route, wait = self._beat, ticket.queue.route, ticket.wait
        if wait is None or not self._has_looked(wait, fill):
            beat.soonest = None
            worker = self._placement.pick(route, ticket, self._walk, fill)
            if worker is not None:
                return worker
            if wait is None:
                wait = ticket.wait = Wait()
        else:
            beat.soonest = wait.retry_at
            if self.changed:
                worker = self._placement.pick_among(self.changed, route, ticket, self._walk, fill)
                if worker is not None:
                    return worker
        # Where workers are kept for others it has not looked at all of them.
        wait.looked = self._round if route.is_untouched(self._walk) else -1
        wait.fill = fill
        wait.retry_at = beat.soonest
        if beat.soonest is not None:
            beat.wake_at(beat.soonest)
        return None

    def _has_looked(self, wait: Wait, fill: float) -> bool:
        """Whether nothing but the workers that changed is worth a look."""
        return (
            wait.looked >= self._round - 1
            and wait.fill >= fill
            and (wait.retry_at is None or wait.retry_at > self._beat.now)
            and not self.looks_everywhere
        )

    def _block(self, ticket: Ticket) -> None:
        """Nobody behind the head may have the workers it waits for."""
        queue = ticket.queue
        route = queue.route
        if queue.blocked_in < self._round - 1:
            queue.blocked_since = self._round
        queue.blocked_in = self._round
        if route.is_untouched(self._walk):
            self._blocked.append(ticket)
        route.close(self._walk)

    # With whom.

    def _send_with_company(self, ticket: Ticket, worker: WorkerState) -> bool:
        """Send the head of a queue and those who go along; say whether a lower lane may be due a turn for it."""
        if worker.pads:
            due = self._send(ticket, worker)
            return self._fill_pass(ticket.queue, worker) or due
        kin = ticket.kin
        if kin is None or kin.size == 1 or ticket.reason is _MAX_WAIT:
            return self._send(ticket, worker)
        return self._send_siblings(ticket, kin, worker)

    def _fill_pass(self, queue: Queue, worker: WorkerState) -> bool:
        """Fill the padded pass that was just opened with those who stand behind its first job."""
        due = False
        fill = queue.line.fill
        while (mate := queue.head()) and worker.is_forming_a_plan_for(mate) and worker.takes(mate, fill):
            due |= self._send(mate, worker)
        return due

    def _send_siblings(self, ticket: Ticket, kin: Kin, worker: WorkerState) -> bool:
        """Send a job and its siblings in one plan, a quantum of them at most."""
        due = self._send(ticket, worker, writes=False)
        family, left = [ticket], QUANTUM_TOKENS
        for mate in mates(kin):
            if mate.reason is _MAX_WAIT or not self._placement.joins(mate, worker, ticket.queue.line.fill, left):
                break
            left -= mate.prefill_tokens
            due |= self._send(mate, worker, in_turn=False, writes=False)
            family.append(mate)
        for member in family:
            if len(family) > 1:
                member.reason = _SIBLING
            write_down(member, worker, self._drafts)
        return due

    # Off they go.

    def _send(self, ticket: Ticket, worker: WorkerState, in_turn: bool = True, writes: bool = True) -> bool:
        """Move a ready job onto a worker and into a plan; say whether a lower lane may be due a turn for it."""
        queue, tokens = ticket.queue, ticket.prefill_tokens
        worker.take(ticket)
        self._depart(ticket, worker)
        ticket.run.goes(tokens, in_turn)
        queue.remove(ticket, in_turn)
        if writes:
            write_down(ticket, worker, self._drafts)
        return self._shares.admitted(queue.line, tokens)

    def _depart(self, ticket: Ticket, worker: WorkerState) -> None:
        """A job that its worker has taken counts as sent from here on."""
        line = ticket.queue.line
        line.leaves(ticket)
        line.drain.departed += 1
        if ticket.due is not None:
            self._agenda.drop(ticket)
        ticket.stage = PLANNED
        ticket.worker = worker
        ticket.wait = None
        ticket.charged = ticket.prefill_tokens
        if ticket.job.prefix:
            self._placement.sent(ticket, worker)
            self.changed[worker] = None
        if ticket.watch is not None:
            ticket.watch.went(ticket, self._beat.now)
        if line.preemptible:
            worker.stoppable[ticket] = None
