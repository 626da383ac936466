"""Ready jobs in fair order: tenants by what they were served, then their runs, then arrival.

Keys in the heaps may lag behind the accounts, never run ahead of them, because virtual time never falls. So the first
entry that is up to date is the true first, and what happens to accounts costs nothing until somebody looks.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Generic, TypeVar

from inferry.scheduling.fairness import Run, Tenant
from inferry.scheduling.tickets import READY, Ticket

WORTH_COMPACTING = 64
_arrival = attrgetter("job.arrived_at", "number")


class Flow:
    """The ready jobs of one run in one queue, by arrival. Those that left stand in the row until it comes to them."""

    __slots__ = ("_row", "account", "size")

    def __init__(self, account: Run) -> None:
        self.account = account
        self.size = 0
        self._row: deque[Ticket] = deque()

    def add(self, ticket: Ticket) -> bool:
        """Put a job in its place; say whether that is the first."""
        row = self._row
        self.size += 1
        if self.size == 1:
            row.clear()
            row.append(ticket)
            return True
        last = row[-1]
        arrived_at, last_arrived_at = ticket.job.arrived_at, last.job.arrived_at
        if last_arrived_at < arrived_at or (last_arrived_at == arrived_at and last.number < ticket.number):
            row.append(ticket)
            return False
        insort(row, ticket, key=_arrival)
        return self.first() is ticket

    def remove(self, ticket: Ticket) -> None:
        self.size -= 1
        row = self._row
        if row[0] is ticket:
            row.popleft()
        elif len(row) > 2 * self.size + WORTH_COMPACTING:
            self._row = deque(other for other in row if other.stage is READY)

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
        near: list[Ticket] = []
        for ticket in self._row:
            if ticket.stage is READY:
                near.append(ticket)
                if len(near) == count:
                    break
        return near


class Party:
    """The flows of one tenant in one queue."""

    __slots__ = ("account", "flows", "size")

    def __init__(self, account: Tenant) -> None:
        self.account = account
        self.size = 0
        self.flows: Order[Flow] = Order()


_Member = TypeVar("_Member", Flow, Party)


class Order(Generic[_Member]):
    """Flows or parties, the least served first; between equals the warmest, then the one that came first.

    A member that has become empty never comes back: its entry is dropped when it comes to the front.
    """

    __slots__ = ("_came", "heap", "members")

    def __init__(self) -> None:
        self._came = 0
        self.heap: list[tuple[float, int, int, int, _Member]] = []
        self.members: dict[Run | Tenant, _Member] = {}

    def add(self, member: _Member, warmth: int) -> None:
        account = member.account
        self.members[account] = member
        self._came += 1
        heappush(self.heap, (account.at, -warmth, account.rank, self._came, member))

    def drop(self, member: _Member) -> None:
        """It has nobody left."""
        del self.members[member.account]
        heap = self.heap
        if heap[0][4] is member:
            heappop(heap)
        elif len(heap) > 2 * len(self.members) + WORTH_COMPACTING:
            self.heap = [entry for entry in heap if entry[4].size]
            heapify(self.heap)

    def first(self) -> _Member:
        """The member whose turn it is. There must be one."""
        heap = self.heap
        while True:
            at, warmth, _, came, member = heap[0]
            account = member.account
            if not member.size:
                heappop(heap)
            elif at == account.at:
                return member
            else:
                heapreplace(heap, (account.at, warmth, account.rank, came, member))

    def nearest(self, count: int) -> list[_Member]:
        """Some of those near the front, in no order."""
        return [entry[4] for entry in self.heap[:count] if entry[4].size]


class Division:
    """A queue in which more than one run waits: parties of tenants, and in each of them flows of runs."""

    __slots__ = ("_head", "_parties", "_run_at", "_tenant_at", "_warmth_of")

    def __init__(self, only: Flow, warmth_of: Callable[[Ticket], int]) -> None:
        """Made of the only flow there was until now, with one more to come."""
        self._parties: Order[Party] = Order()
        self._warmth_of = warmth_of
        first = only.first()
        assert first is not None
        self._join(only, None, first)
        self._parties.members[only.account.tenant].size = only.size
        self._head: Ticket | None = None
        self._run_at = self._tenant_at = 0.0

    def head(self) -> Ticket | None:
        """Who goes next. It stays the same while its own accounts stand still: others only move further back."""
        head = self._head
        if head is not None and head.stage is READY:
            run = head.run
            if run.at == self._run_at and run.tenant.at == self._tenant_at:
                return head
        head = self._head = self._parties.first().flows.first().first()
        if head is not None:
            run = head.run
            self._run_at, self._tenant_at = run.at, run.tenant.at
        return head

    def add(self, ticket: Ticket) -> bool:
        """Put a job in its place; say whether it is the head now."""
        head = self.head()
        if not self._add(ticket) or (head is not None and ticket.run.tenant.at > head.run.tenant.at):
            return False
        self._head = None
        return self.head() is ticket

    def _add(self, ticket: Ticket) -> bool:
        """Put a job in its place; say whether it is the first of its run."""
        run = ticket.run
        tenant = run.tenant
        party = self._parties.members.get(tenant)
        flow = None if party is None else party.flows.members.get(run)
        if party is None or flow is None:
            flow = Flow(run)
            self._join(flow, party, ticket)
        else:
            party.size += 1
        return flow.add(ticket)

    def _join(self, flow: Flow, party: Party | None, ticket: Ticket) -> None:
        """A run comes with a job. How warm that is decides between equals, and is found out only here."""
        warmth = self._warmth_of(ticket) if ticket.job.prefix else 0
        if party is None:
            party = Party(flow.account.tenant)
            self._parties.add(party, warmth)
        party.flows.add(flow, warmth)
        party.size += 1

    def remove(self, ticket: Ticket) -> None:
        run = ticket.run
        party = self._parties.members[run.tenant]
        flow = party.flows.members[run]
        flow.remove(ticket)
        party.size -= 1
        if not flow.size:
            if party.size:
                party.flows.drop(flow)
            else:
                self._parties.drop(party)

    def nearest(self, count: int) -> list[Ticket]:
        """Some of those near the front, in no order."""
        parties = self._parties.nearest(count)
        return [ticket for party in parties for flow in party.flows.nearest(2) for ticket in flow.nearest(2)]


def order(ticket: Ticket) -> tuple[float, int, float, int, float, int]:
    """Where a head stands among the heads of its lane."""
    run = ticket.run
    tenant = run.tenant
    return tenant.at, tenant.rank, run.at, run.rank, ticket.job.arrived_at, ticket.number
