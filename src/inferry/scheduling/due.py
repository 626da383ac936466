"""What will happen by itself, earliest first."""

from heapq import heapify, heappop, heappush

from inferry.scheduling.tickets import Ticket

_WORTH_COMPACTING = 64


class Agenda:
    """Tickets by the time they are due. A ticket has one date at most; a new one replaces the old.

    Dropped dates stay in the `heap` until they surface or until they outnumber the live ones, so that neither dropping
    nor looking costs more as the backlog grows.
    """

    __slots__ = ("_dropped", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Ticket]] = []
        self._dropped = 0

    def __len__(self) -> int:
        return len(self.heap) - self._dropped

    def put(self, ticket: Ticket, due: float) -> None:
        if ticket.due is not None:
            self.drop(ticket)
        ticket.due = due
        heappush(self.heap, (due, ticket.number, ticket))

    def drop(self, ticket: Ticket) -> None:
        if ticket.due is None:
            return
        ticket.due = None
        self._dropped += 1
        if self._dropped > _WORTH_COMPACTING and 2 * self._dropped > len(self.heap):
            self.heap = [entry for entry in self.heap if entry[2].due == entry[0]]
            heapify(self.heap)
            self._dropped = 0

    def next(self) -> float | None:
        """When the next ticket is due."""
        heap = self.heap
        while heap:
            due, _, ticket = heap[0]
            if ticket.due == due:
                return due
            heappop(heap)
            self._dropped -= 1
        return None

    def pop(self, now: float) -> Ticket | None:
        """The next ticket that is due by now, taken off the agenda."""
        due = self.next()
        if due is None or due > now:
            return None
        ticket = heappop(self.heap)[2]
        ticket.due = None
        return ticket
