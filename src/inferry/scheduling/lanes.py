"""Lanes and their queues: who waits, in which order."""

from bisect import insort
from collections import deque
from operator import attrgetter

from inferry.domain.jobs import BatchKey, InferenceJob, Lane, LanePolicy, RouteKey
from inferry.scheduling.drain import DrainRate
from inferry.scheduling.placement import Route
from inferry.scheduling.tickets import GONE, READY, Ticket

_WORTH_COMPACTING = 64
_arrival = attrgetter("job.arrived_at", "number")


class Queue:
    """The jobs of one lane and key: some held for company, the others ready, in order of arrival.

    `overtaken` counts the prompt tokens of lower lanes that went before the present head.
    """

    __slots__ = ("_ready", "_size", "held", "held_kv_tokens", "held_prefill_tokens", "line", "overtaken", "route")

    def __init__(self, line: "Line", route: Route) -> None:
        self.line = line
        self.route = route
        self.held: dict[str, Ticket] = {}
        self.held_kv_tokens = 0
        self.held_prefill_tokens = 0
        self.overtaken = 0
        self._ready: deque[Ticket] = deque()
        self._size = 0

    def hold(self, ticket: Ticket) -> None:
        self.held[ticket.job.job_id] = ticket
        self.held_kv_tokens += ticket.kv_tokens
        self.held_prefill_tokens += ticket.prefill_tokens

    def let_go(self, ticket: Ticket) -> None:
        del self.held[ticket.job.job_id]
        self.held_kv_tokens -= ticket.kv_tokens
        self.held_prefill_tokens -= ticket.prefill_tokens

    def head(self) -> Ticket | None:
        """The ready job that arrived first."""
        ready = self._ready
        while ready:
            ticket = ready[0]
            if ticket.stage is READY:
                return ticket
            ready.popleft()
        return None

    def push(self, ticket: Ticket) -> bool:
        """Make the job ready, in its place by arrival; say whether it is the head now."""
        ticket.stage = READY
        line, ready = self.line, self._ready
        line.ready += 1
        self._size += 1
        if self._size == 1:
            ready.clear()
            ready.append(ticket)
            line.waiting[self] = None
        elif (ready[-1].job.arrived_at, ready[-1].number) < (ticket.job.arrived_at, ticket.number):
            ready.append(ticket)
            return False
        else:
            insort(ready, ticket, key=_arrival)
            if self.head() is not ticket:
                return False
        self.overtaken = 0
        line.first_seen = None
        return True

    def pop(self) -> None:
        """Take off the head, which somebody has just looked at."""
        self._ready.popleft()
        self._one_less(was_head=True)

    def strike(self, ticket: Ticket) -> None:
        """Drop a ready job wherever it stands; the row closes up when that is worth the walk."""
        was_head = self.head() is ticket
        ticket.stage = GONE
        self._one_less(was_head)
        if len(self._ready) > 2 * self._size + _WORTH_COMPACTING:
            self._ready = deque(t for t in self._ready if t.stage is READY)

    def _one_less(self, was_head: bool) -> None:
        line = self.line
        line.ready -= 1
        self._size -= 1
        if not self._size:
            del line.waiting[self]
        if was_head:
            self.overtaken = 0
            line.first_seen = None


class Line:
    """One lane: its policy, its queues, and how many jobs they hold in all.

    `waiting` are the queues with ready jobs; `credit` is what the lane is owed, in prompt tokens; `fill` is the part of
    a worker's room it may fill. `first_seen` is the answer of `first`, until a head or the workers change.
    """

    __slots__ = (
        "coalesce_s",
        "credit",
        "depth",
        "drain",
        "fill",
        "first_seen",
        "lane",
        "max_wait_s",
        "policy",
        "queues",
        "ready",
        "waiting",
        "window",
    )

    def __init__(self, lane: Lane, policy: LanePolicy) -> None:
        self.lane = lane
        self.policy = policy
        self.window = policy.window
        self.coalesce_s = policy.coalesce_ms / 1000
        self.max_wait_s = policy.max_wait_ms / 1000
        self.fill = 1.0 - policy.reserve
        self.queues: dict[RouteKey | BatchKey, Queue] = {}
        self.waiting: dict[Queue, None] = {}
        self.depth = 0
        self.ready = 0
        self.credit = 0.0
        self.drain = DrainRate()
        self.first_seen: Queue | None = None

    def queue_for(self, job: InferenceJob, route: Route) -> Queue:
        """The queue a new job joins. Batch keys split queues only in front of workers that pad."""
        key = job.batch_key if route.some_pad else job.route
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = Queue(self, route)
        return queue

    def first(self) -> Queue | None:
        """The queue whose head arrived first, among those that some worker serves."""
        if self.first_seen is None:
            served = [
                (_arrival(head), queue) for queue in self.waiting if queue.route.workers and (head := queue.head())
            ]
            self.first_seen = min(served, key=lambda pair: pair[0])[1] if served else None
        return self.first_seen

    def prune(self) -> None:
        """Forget queues that nobody is in."""
        self.queues = {key: queue for key, queue in self.queues.items() if queue.held or queue in self.waiting}
