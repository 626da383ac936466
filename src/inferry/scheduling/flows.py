"""Ready jobs in fair order: tenants by what they were served, then their runs, then arrival.

Keys in the heaps may lag behind the accounts, never run ahead of them, because virtual time never falls. So the first
entry that is up to date is the true first, and what happens to accounts costs nothing until somebody looks.
"""

from bisect import insort
from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Generic, TypeVar

from inferry.scheduling.fairness import Account
from inferry.scheduling.tickets import READY, Ticket

WORTH_COMPACTING = 64
_arrival = attrgetter("job.arrived_at", "number")


class Flow:
    """The ready jobs of one run in one queue, by arrival. Those that left stand in the row until it comes to them."""

    __slots__ = ("_row", "account", "party", "size", "warmth")

    def __init__(self, account: Account, party: "Party") -> None:
        self.account = account
        self.party = party
        self.size = 0
        self.warmth = 0
        self._row: deque[Ticket] = deque()

    def add(self, ticket: Ticket) -> None:
        row = self._row
        if not self.size:
            row.clear()
            row.append(ticket)
        elif (row[-1].job.arrived_at, row[-1].number) < (ticket.job.arrived_at, ticket.number):
            row.append(ticket)
        else:
            insort(row, ticket, key=_arrival)
        self.size += 1

    def first(self) -> Ticket | None:
        row = self._row
        while row:
            ticket = row[0]
            if ticket.stage is READY:
                return ticket
            row.popleft()
        return None

    def nearest(self, count: int) -> list[Ticket]:
        """Some of the first, in order."""
        row = self._row
        near: list[Ticket] = []
        while row and len(near) < count:
            ticket = row.popleft()
            if ticket.stage is READY:
                near.append(ticket)
        row.extendleft(reversed(near))
        return near

    def compact(self) -> None:
        if len(self._row) > 2 * self.size + WORTH_COMPACTING:
            self._row = deque(ticket for ticket in self._row if ticket.stage is READY)


class Party:
    """The flows of one tenant in one queue."""

    __slots__ = ("account", "flows", "size", "warmth")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.size = 0
        self.warmth = 0
        self.flows: Order[Flow] = Order()


_Member = TypeVar("_Member", Flow, Party)


class Order(Generic[_Member]):
    """Flows or parties, the least served first; between equals the warmest, then the one that came first."""

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, _Member]] = []
        self._members: dict[Account, _Member] = {}

    def get(self, account: Account) -> _Member | None:
        return self._members.get(account)

    def add(self, member: _Member) -> None:
        account = member.account
        self._members[account] = member
        heappush(self._heap, (account.at, -member.warmth, account.rank, member))

    def first(self) -> _Member | None:
        heap = self._heap
        while heap:
            at, warmth, _, member = heap[0]
            account = member.account
            if not member.size:
                heappop(heap)
                del self._members[account]
            elif at == account.at:
                return member
            else:
                heapreplace(heap, (account.at, warmth, account.rank, member))
        return None

    def nearest(self, count: int) -> list[_Member]:
        """Some of those near the front, in no order."""
        return [entry[3] for entry in self._heap[:count] if entry[3].size]

    def compact(self, size: int) -> None:
        """Drop members that have nobody left, once they outnumber the jobs there are."""
        if len(self._heap) > 2 * size + WORTH_COMPACTING:
            self._heap = [entry for entry in self._heap if entry[3].size]
            heapify(self._heap)
            self._members = {entry[3].account: entry[3] for entry in self._heap}


def order(ticket: Ticket) -> tuple[float, int, float, int, float, int]:
    """Where a head stands among the heads of its lane."""
    tenant, run = ticket.tenant, ticket.run
    return tenant.at, tenant.rank, run.at, run.rank, ticket.job.arrived_at, ticket.number
