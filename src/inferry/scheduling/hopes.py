"""Who goes before a job that has lost its first-token promise.

Fair order decides who is next while every promise can be kept. In a burst that is more than workers can do in time, it
lets jobs wait just long enough to be late, one after the other. So a head whose promise is lost lets those of its queue
go first whose promise can still be kept, the earliest first.

The law: a job gives way only after `LOST` of its lane's first-token promise and never for longer than until `YIELDS`
times that promise is over; from then on it has its place in fair order again. So where a lane is overloaded for good
nobody starves, and tenants keep their shares: those who give way are charged nothing and stay first. Lanes without a
promise keep fair order alone, and so do workers that pad, where company counts for more.
"""

from collections import deque

from inferry.scheduling.tickets import READY, Ticket

LOST = 0.95
"""The part of its promise after which a job that still waits is taken to be late: its prompt has to be computed too."""
YIELDS = 2.0
_WORTH_COMPACTING = 64


class Hopes:
    """The ready jobs of a queue in the order they came. Those that left, or lost hope, stand there until looked at."""

    __slots__ = ("_row",)

    def __init__(self) -> None:
        self._row: deque[Ticket] = deque()

    def add(self, ticket: Ticket, ready: int) -> None:
        """A job is ready, one of so many."""
        if ready == 1:
            self._row.clear()
        self._row.append(ticket)
        if len(self._row) > 2 * ready + _WORTH_COMPACTING:
            self._row = deque(other for other in self._row if other.stage is READY)

    def instead_of(self, head: Ticket, ttft_s: float, now: float) -> Ticket:
        """Who goes now: the head, or the first to come of those who can still be in time where the head cannot."""
        waited_s = now - head.job.arrived_at
        if not LOST * ttft_s < waited_s <= YIELDS * ttft_s:
            return head
        row, late_since = self._row, now - LOST * ttft_s
        while row:
            ticket = row[0]
            if ticket.stage is READY and ticket.job.arrived_at >= late_since:
                return ticket
            row.popleft()
        return head
