"""Ready jobs in fair order: tenants by what they were served, then their runs, then arrival.

Keys in the heaps may lag behind the accounts, never run ahead of them, because virtual time never falls. So the first
entry that is up to date is the true first, and a charge to an account costs nothing until the next look.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Final, Generic, TypeVar

from inferry.scheduling.queues.fair_share import RunAccount, TenantAccount
from inferry.scheduling.queues.queued_job import READY, QueuedJob

COMPACTION_THRESHOLD: Final = 64
_arrival_key: Final = attrgetter("job.arrived_at", "number")


class RunQueue:
    """The ready jobs of one run in one queue, by arrival. Those that left stand in the row until it comes to them."""

    __slots__ = ("_pending", "account", "size")

    def __init__(self, account: RunAccount) -> None:
        self.account = account
        self.size = 0
        self._pending: deque[QueuedJob] = deque()

    def add(self, entry: QueuedJob) -> bool:
        """Put a job in its place; say whether that is the first."""
        pending = self._pending
        self.size += 1
        if self.size == 1:
            pending.clear()
            pending.append(entry)
            return True
        last = pending[-1]
        arrived_at, last_arrived_at = entry.job.arrived_at, last.job.arrived_at
        if last_arrived_at < arrived_at or (last_arrived_at == arrived_at and last.number < entry.number):
            pending.append(entry)
            return False
        insort(pending, entry, key=_arrival_key)
        return self.first() is entry

    def remove(self, entry: QueuedJob) -> None:
        self.size -= 1
        pending = self._pending
        if pending[0] is entry:
            pending.popleft()
        elif len(pending) > 2 * self.size + COMPACTION_THRESHOLD:
            self._pending = deque(other for other in pending if other.state is READY)

    def first(self) -> QueuedJob | None:
        pending = self._pending
        while pending:
            entry = pending[0]
            if entry.state is READY:
                return entry
            pending.popleft()
        return None

    def peek(self, count: int) -> list[QueuedJob]:
        """Some of the first, in order."""
        nearby: list[QueuedJob] = []
        for entry in self._pending:
            if entry.state is READY:
                nearby.append(entry)
                if len(nearby) == count:
                    break
        return nearby


class TenantQueue:
    """The run queues of one tenant in one queue."""

    __slots__ = ("account", "run_queues", "size")

    def __init__(self, account: TenantAccount) -> None:
        self.account = account
        self.size = 0
        self.run_queues: FairHeap[RunQueue] = FairHeap()


_Member = TypeVar("_Member", RunQueue, TenantQueue)


class FairHeap(Generic[_Member]):
    """Run queues or tenant queues, the least served first; between equals the warmest, then the one that came first.

    A member that has become empty never comes back: its entry is dropped when it comes to the front.
    """

    __slots__ = ("_insertions", "heap", "members")

    def __init__(self) -> None:
        self._insertions = 0
        self.heap: list[tuple[float, int, int, int, _Member]] = []
        self.members: dict[RunAccount | TenantAccount, _Member] = {}

    def add(self, member: _Member, warm_slices: int) -> None:
        account = member.account
        self.members[account] = member
        self._insertions += 1
        heappush(self.heap, (account.virtual_time, -warm_slices, account.rank, self._insertions, member))

    def drop(self, member: _Member) -> None:
        """Remove a member without jobs."""
        del self.members[member.account]
        heap = self.heap
        if heap[0][4] is member:
            heappop(heap)
        elif len(heap) > 2 * len(self.members) + COMPACTION_THRESHOLD:
            self.heap = [item for item in heap if item[4].size]
            heapify(self.heap)

    def first(self) -> _Member:
        """The member whose turn it is. There must be one."""
        heap = self.heap
        while True:
            virtual_time, warm_slices, _, insertion, member = heap[0]
            account = member.account
            if not member.size:
                heappop(heap)
            elif virtual_time == account.virtual_time:
                return member
            else:
                heapreplace(heap, (account.virtual_time, warm_slices, account.rank, insertion, member))

    def peek(self, count: int) -> list[_Member]:
        """Some of those near the front, in no order."""
        return [item[4] for item in self.heap[:count] if item[4].size]


class FairQueue:
    """A queue in which more than one run waits: queues of tenants, and in each of them queues of runs."""

    __slots__ = ("_head", "_run_virtual_time", "_tenant_queues", "_tenant_virtual_time", "_warm_slices_of")

    def __init__(self, single_run: RunQueue, warm_slices_of: Callable[[QueuedJob], int]) -> None:
        """Made of the only run queue there was until now, with one more to come."""
        self._tenant_queues: FairHeap[TenantQueue] = FairHeap()
        self._warm_slices_of = warm_slices_of
        first = single_run.first()
        assert first is not None
        self._add_run(single_run, None, first)
        self._tenant_queues.members[single_run.account.tenant].size = single_run.size
        self._head: QueuedJob | None = None
        self._run_virtual_time = self._tenant_virtual_time = 0.0

    def head(self) -> QueuedJob | None:
        """The job that goes next. It stays the same until its own accounts are charged: others only move back."""
        head = self._head
        if head is not None and head.state is READY:
            run = head.run
            if run.virtual_time == self._run_virtual_time and run.tenant.virtual_time == self._tenant_virtual_time:
                return head
        head = self._head = self._tenant_queues.first().run_queues.first().first()
        if head is not None:
            run = head.run
            self._run_virtual_time, self._tenant_virtual_time = run.virtual_time, run.tenant.virtual_time
        return head

    def add(self, entry: QueuedJob) -> bool:
        """Put a job in its place; say whether it is the head now."""
        head = self.head()
        if not self._add(entry) or (head is not None and entry.run.tenant.virtual_time > head.run.tenant.virtual_time):
            return False
        self._head = None
        return self.head() is entry

    def _add(self, entry: QueuedJob) -> bool:
        """Put a job in its place; say whether it is the first of its run."""
        run = entry.run
        tenant = run.tenant
        tenant_queue = self._tenant_queues.members.get(tenant)
        run_queue = None if tenant_queue is None else tenant_queue.run_queues.members.get(run)
        if tenant_queue is None or run_queue is None:
            run_queue = RunQueue(run)
            self._add_run(run_queue, tenant_queue, entry)
        else:
            tenant_queue.size += 1
        return run_queue.add(entry)

    def _add_run(self, run_queue: RunQueue, tenant_queue: TenantQueue | None, entry: QueuedJob) -> None:
        """A run comes with a job. How warm that is decides between equals, and is found out only here."""
        warm_slices = self._warm_slices_of(entry) if entry.job.prefix else 0
        if tenant_queue is None:
            tenant_queue = TenantQueue(run_queue.account.tenant)
            self._tenant_queues.add(tenant_queue, warm_slices)
        tenant_queue.run_queues.add(run_queue, warm_slices)
        tenant_queue.size += 1

    def remove(self, entry: QueuedJob) -> None:
        run = entry.run
        tenant_queue = self._tenant_queues.members[run.tenant]
        run_queue = tenant_queue.run_queues.members[run]
        run_queue.remove(entry)
        tenant_queue.size -= 1
        if not run_queue.size:
            if tenant_queue.size:
                tenant_queue.run_queues.drop(run_queue)
            else:
                self._tenant_queues.drop(tenant_queue)

    def peek(self, count: int) -> list[QueuedJob]:
        """Some of those near the front, in no order."""
        tenant_queues = self._tenant_queues.peek(count)
        return [
            entry
            for tenant_queue in tenant_queues
            for run_queue in tenant_queue.run_queues.peek(2)
            for entry in run_queue.peek(2)
        ]


def fair_key(entry: QueuedJob) -> tuple[float, int, float, int, float, int]:
    """Where a head stands among the heads of its lane."""
    run = entry.run
    tenant = run.tenant
    return tenant.virtual_time, tenant.rank, run.virtual_time, run.rank, entry.job.arrived_at, entry.number
