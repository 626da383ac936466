"""Siblings: jobs of one run or one template that begin alike and are ready at the same time go together.

The first of them pays for the prefix, the others find it warm. They go to the worker that takes the first, in one plan,
as far as there is room and for one quantum of prompt tokens at most: that is what others may have to wait for.
"""

from collections import deque
from collections.abc import Iterator

from inferry.scheduling.tickets import READY, Ticket

KinKey = tuple[str, str, str]


class Kin:
    """Siblings that are ready in one queue."""

    __slots__ = ("key", "size", "tickets")

    def __init__(self, key: KinKey) -> None:
        self.key = key
        self.size = 0
        self.tickets: deque[Ticket] = deque()


class Families:
    """The siblings in one queue, by what they have in common. Jobs without a prefix have none and cost nothing."""

    __slots__ = ("_kin",)

    def __init__(self) -> None:
        self._kin: dict[KinKey, Kin] = {}

    def add(self, ticket: Ticket) -> None:
        job = ticket.job
        key = (job.tenant, job.template_id or job.run_id, job.prefix[0])
        kin = self._kin.get(key)
        if kin is None:
            kin = self._kin[key] = Kin(key)
        ticket.kin = kin
        kin.tickets.append(ticket)
        kin.size += 1

    def remove(self, ticket: Ticket, kin: Kin) -> None:
        ticket.kin = None
        kin.size -= 1
        if not kin.size:
            del self._kin[kin.key]


def mates(kin: Kin) -> Iterator[Ticket]:
    """Siblings that are still ready, first come first, for as long as the caller takes what it gets."""
    tickets = kin.tickets
    while tickets:
        mate = tickets[0]
        if mate.stage is READY:
            yield mate
            if mate.stage is READY:
                return
        tickets.popleft()
