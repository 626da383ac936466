"""Who goes next: the heads of all queues, by lane and then by arrival, except where a lower lane is owed a turn."""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from inferry.scheduling.due import Agenda
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.packing import Draft, WorkerState, board
from inferry.scheduling.placement import close, least_loaded
from inferry.scheduling.shares import Shares
from inferry.scheduling.tickets import PLANNED, Ticket


class Boarding:
    """Moves ready jobs onto workers until nobody else can go.

    It walks the heads, best first. A head without room keeps the workers it waits for from everybody behind it, until
    the next walk: that is what stops small and lower-lane jobs from eating the room it needs. Only heads are looked
    at, so a walk costs what the number of queues costs, not the backlog.
    """

    __slots__ = ("_agenda", "_drafts", "_lines", "_shares", "_walk")

    def __init__(self, lines: Sequence[Line], agenda: Agenda) -> None:
        self._lines = lines
        self._agenda = agenda
        self._shares = Shares(lines)
        self._drafts: list[Draft] = []
        self._walk = 0

    def fill_workers(self) -> list[Draft]:
        """Send everybody who can go. In the end nobody has both a place in the order and room."""
        self._drafts = []
        while True:
            self._walk += 1
            kept_for = self._serve_turns()
            self._serve_in_order(kept_for)
            if self._shares.turn() is kept_for:
                break
        for draft in self._drafts:
            draft.worker.drafts.clear()
        return self._drafts

    def _serve_turns(self) -> Queue | None:
        """Lower lanes that are owed go first. One that finds no room has its workers kept for it: return its queue.

        What is owed is paid out of the whole room, also out of what the lane leaves to higher ones otherwise.
        """
        while (queue := self._shares.turn()) is not None and (ticket := queue.head()) is not None:
            worker = least_loaded(queue.route.workers, ticket, self._walk, 1.0)
            if worker is None:
                close(queue.route.workers, self._walk)
                break
            self._shares.takes_turn(queue, ticket.prefill_tokens)
            self._send(ticket, worker)
        return queue

    def _serve_in_order(self, kept_for: Queue | None) -> None:
        """Walk the heads to the end, or until another lower lane is owed a turn."""
        heads = [
            (line.lane, head.job.arrived_at, head.number, head)
            for line in self._lines
            for queue in line.waiting
            if (head := queue.head()) is not None
        ]
        heapify(heads)
        while heads:
            ticket = heads[0][3]
            queue = ticket.queue
            workers = queue.route.workers
            worker = least_loaded(workers, ticket, self._walk, queue.line.fill)
            if worker is None:
                close(workers, self._walk)
                heappop(heads)
                continue
            turn_may_be_due = self._send(ticket, worker)
            if worker.pads:
                turn_may_be_due |= self._send_company(queue, worker)
            if turn_may_be_due and self._shares.turn() is not kept_for:
                return
            head = queue.head()
            if head is None:
                heappop(heads)
            else:
                heapreplace(heads, (queue.line.lane, head.job.arrived_at, head.number, head))

    def _send_company(self, queue: Queue, worker: WorkerState) -> bool:
        """Fill the padded pass that was just opened with those who stand behind its first job."""
        turn_may_be_due = False
        fill = queue.line.fill
        while (mate := queue.head()) and worker.has_room(mate, fill) and worker.is_forming_a_plan_for(mate):
            turn_may_be_due |= self._send(mate, worker)
        return turn_may_be_due

    def _send(self, ticket: Ticket, worker: WorkerState) -> bool:
        """Move the head of a queue onto a worker; say whether a lower lane may be due a turn for it."""
        queue = ticket.queue
        line = queue.line
        queue.pop()
        line.depth -= 1
        line.drain.departed += 1
        if ticket.due is not None:
            self._agenda.drop(ticket)
        ticket.stage = PLANNED
        ticket.worker = worker
        board(ticket, worker, self._drafts)
        return self._shares.admitted(line, ticket.prefill_tokens)
