"""Lanes and their queues: who waits, in which order."""

from collections.abc import Callable
from math import ceil

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import Ahead
from inferry.domain.routes import BatchKey, RouteKey
from inferry.scheduling.company import Company
from inferry.scheduling.drain import DrainRate
from inferry.scheduling.fairness import LaneAccounts
from inferry.scheduling.flows import Division, Flow, order
from inferry.scheduling.hopes import Hopes
from inferry.scheduling.kin import Families
from inferry.scheduling.placing.routes import Route
from inferry.scheduling.quantum import QUANTUM_TOKENS
from inferry.scheduling.siblings import Watches
from inferry.scheduling.tickets import READY, Ticket

PREPAID_TOKENS = 4 * QUANTUM_TOKENS
"""How much of what a lane was served in order counts when it is owed something: batch work that had the engine until
now is not owed a turn the moment a burst of live work begins."""


class Hall:
    """What all lanes have in common: how many queues somebody waits in."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0


class Queue:
    """The jobs of one lane and key: some held for company, the others ready, in fair order.

    While only one run waits there is no order to keep but arrival, and `_only` is all there is; `_division` is made
    when a second one comes. `overtaken` counts the prompt tokens of lower lanes that went since a head of this queue
    last left. `size` counts the ready jobs; none of them needs less than `least_kv_tokens`. `blocked_in` is the last
    round of planning that left a head here, `blocked_since` the first of those on end; `no_victims_before` one before
    which preemption need not look again.
    """

    __slots__ = (
        "_division",
        "_families",
        "_hopes",
        "_only",
        "blocked_in",
        "blocked_since",
        "company",
        "held",
        "held_kv_tokens",
        "held_prefill_tokens",
        "least_kv_tokens",
        "line",
        "no_victims_before",
        "overtaken",
        "route",
        "size",
        "watches",
    )

    def __init__(self, line: "Line", route: Route) -> None:
        self.line = line
        self.route = route
        self.company = Company()
        self.watches = Watches(line.coalesce_s)
        self.held: dict[str, Ticket] = {}
        self.held_kv_tokens = 0
        self.held_prefill_tokens = 0
        self.overtaken = 0
        self.no_victims_before = 0
        self.least_kv_tokens = 0
        self.blocked_in = self.blocked_since = -2
        self._only: Flow | None = None
        self._division: Division | None = None
        self._families = Families()
        self._hopes = Hopes()
        self.size = 0

    def hold(self, ticket: Ticket) -> None:
        self.held[ticket.job.job_id] = ticket
        self.held_kv_tokens += ticket.kv_tokens
        self.held_prefill_tokens += ticket.prefill_tokens

    def let_go(self, ticket: Ticket) -> None:
        del self.held[ticket.job.job_id]
        self.held_kv_tokens -= ticket.kv_tokens
        self.held_prefill_tokens -= ticket.prefill_tokens

    def head(self) -> Ticket | None:
        """The ready job that goes next: of the least served tenant, of its least served run, the first to arrive."""
        division = self._division
        if division is not None:
            return division.head()
        return None if self._only is None else self._only.first()

    def goes_now(self, head: Ticket, now: float) -> Ticket:
        """The head, or whoever it gives way to because its own promise is lost and theirs is not."""
        ttft_s = self.line.ttft_s
        if ttft_s is None or self.size == 1 or self.route.some_pad:
            return head
        return self._hopes.instead_of(head, ttft_s, now)

    def behind(self, head: Ticket, count: int) -> list[Ticket]:
        """A few of those who stand next behind the head, in order."""
        if self._division is not None:
            near = [ticket for ticket in self._division.nearest(count) if ticket is not head]
            near.sort(key=order)
            return near[:count]
        return [] if self._only is None else self._only.nearest(count + 1)[1:]

    def push(self, ticket: Ticket) -> bool:
        """Make the job ready, in its place; say whether it is the head now."""
        ticket.stage = READY
        line, run = self.line, ticket.run
        run.entered(ticket.number)
        line.ready += 1
        line.price = None
        if ticket.job.prefix:
            self._families.add(ticket)
        self.size += 1
        if line.ttft_s is not None:
            self._hopes.add(ticket, self.size)
        if self.size == 1:
            self._only = Flow(run)
            self._only.add(ticket)
            self.least_kv_tokens = ticket.kv_tokens
            self.overtaken = self.no_victims_before = 0
            line.waiting[self] = None
            line.hall.waiting += 1
            return True
        if ticket.kv_tokens < self.least_kv_tokens:
            self.least_kv_tokens = ticket.kv_tokens
        only, division = self._only, self._division
        if only is not None:
            if only.account is run:
                return only.add(ticket)
            division = self._division = Division(only, line.warmth_of)
            self._only = None
        assert division is not None
        return division.add(ticket)

    def remove(self, ticket: Ticket, was_head: bool = True) -> None:
        """Take out a ready job, whose stage is another by now. The rows close up when they come to its place.

        Its accounts are told by who sends it, or by whoever makes it leave.
        """
        if ticket.kin is not None:
            self._families.remove(ticket, ticket.kin)
        line = self.line
        line.ready -= 1
        line.price = None
        self.size -= 1
        self._hopes.sent_tokens += ticket.charged
        if was_head:
            self.overtaken = 0
        if not self.size:
            self._only = self._division = None
            del line.waiting[self]
            line.hall.waiting -= 1
        elif self._only is not None:
            self._only.remove(ticket)
        elif self._division is not None:
            self._division.remove(ticket)


class Line:
    """One lane: its policy, its queues, and how many jobs they hold in all.

    `waiting` are the queues with ready jobs; `credit` is what the lane is owed, in prompt tokens, `earns` what it gets
    for every prompt token of a better lane, and `price` what its first job costs, until somebody comes or goes.
    `below` are the lower lanes that own a share, `above` all better ones. `fill` is the part of a worker's room it may
    fill. `groups` are the worker groups it may use, best first, or None for any. `accounts` holds what its tenants were
    served. `depth` counts the jobs held or ready, and the tokens beside it are theirs. `ttft_s` is its first-token
    promise; `is_batch` says that there is none.
    """

    __slots__ = (
        "above",
        "accounts",
        "below",
        "coalesce_s",
        "credit",
        "depth",
        "drain",
        "earns",
        "fill",
        "groups",
        "hall",
        "is_batch",
        "lane",
        "max_wait_s",
        "number",
        "output_tokens",
        "policy",
        "preemptible",
        "price",
        "prompt_tokens",
        "queue_limit",
        "queue_of",
        "queues",
        "ready",
        "routes",
        "ttft_s",
        "waiting",
        "warmth_of",
        "window",
    )

    def __init__(
        self,
        lane: Lane,
        policy: LanePolicy,
        accounts: LaneAccounts,
        hall: Hall,
        warmth_of: Callable[[Ticket], int],
        groups: tuple[str, ...] | None = None,
    ) -> None:
        self.lane = lane
        self.number = int(lane)
        self.policy = policy
        self.groups = groups
        self.hall = hall
        self.warmth_of = warmth_of
        self.window = policy.window
        self.coalesce_s = policy.coalesce_ms / 1000
        self.max_wait_s = policy.max_wait_ms / 1000
        self.queue_limit = policy.queue_limit
        self.preemptible = policy.preemptible
        self.ttft_s = None if policy.ttft_ms is None else policy.ttft_ms / 1000
        self.is_batch = self.ttft_s is None
        self.fill = 1.0 - policy.reserve
        self.accounts = accounts
        self.queues: dict[RouteKey | BatchKey, Queue] = {}
        self.queue_of: dict[RouteKey, Queue] = {}
        self.routes: dict[RouteKey, Route] = {}
        self.waiting: dict[Queue, None] = {}
        self.depth = self.prompt_tokens = self.output_tokens = 0
        self.ready = 0
        self.credit = 0.0
        self.earns = policy.share / (1 - policy.share)
        self.above: tuple[Line, ...] = ()
        self.below: tuple[Line, ...] = ()
        self.price: int | None = None
        self.drain = DrainRate()

    def queue_for(self, job: InferenceJob, route: Route) -> Queue:
        """The queue a new job joins. Batch keys split queues only in front of workers that pad."""
        key = job.batch_key if route.some_pad else job.route
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = Queue(self, route)
        if not route.some_pad:
            self.queue_of[job.route] = queue
        return queue

    def first(self) -> Queue | None:
        """The queue whose head goes first, among those that some worker serves."""
        if len(self.waiting) == 1:
            queue = next(iter(self.waiting))
            return queue if queue.route.tiers else None
        served = [queue for queue in self.waiting if queue.route.tiers]
        if len(served) < 2:
            return served[0] if served else None
        return min([(order(head), queue) for queue in served if (head := queue.head())], key=lambda pair: pair[0])[1]

    def pays(self, tokens: int) -> None:
        """A job of the lane goes. Whoever is served is owed less; served without being owed, it has paid in advance."""
        if not self.earns:
            return
        credit = self.credit - tokens
        if credit < -PREPAID_TOKENS:
            if self.credit < -PREPAID_TOKENS:  # what it owes for a job that was larger than a quantum stays owed
                return
            credit = float(-PREPAID_TOKENS)
        self.credit = credit if self.ready or credit < 0 else 0.0

    def first_price(self) -> int:
        """What the lane must be owed for its first job to go before its betters."""
        if self.price is None:
            queue = self.first()
            head = None if queue is None else queue.head()
            self.price = _NEVER if head is None else min(head.prefill_tokens, QUANTUM_TOKENS)
        return self.price

    def ticket_for(self, job: InferenceJob, number: int, queue: Queue) -> Ticket:
        """A job is queued."""
        run = self.accounts.joined(job.tenant, job.run_id)
        ticket = Ticket(job, number, queue, run)
        self.depth += 1
        self.prompt_tokens += ticket.cold_tokens
        self.output_tokens += job.footprint.output.expected
        run.tenant.queued += 1
        return ticket

    def leaves(self, ticket: Ticket) -> None:
        """A job is queued no more."""
        self.depth -= 1
        self.prompt_tokens -= ticket.cold_tokens
        self.output_tokens -= ticket.job.footprint.output.expected
        ticket.run.tenant.queued -= 1

    def ahead(self, tenant: str | None) -> Ahead:
        """What goes before the next job of the tenant: its own jobs, and as many of others as fair share gives them in
        the meantime, never more than there are, each taken for an average one. All there are where no tenant is named.
        """
        if tenant is None:
            return Ahead(self.depth, self.prompt_tokens, self.output_tokens)
        own = self.accounts.members.get(tenant)
        if own is None or not own.queued:
            return Ahead()
        jobs = min(self.depth, ceil(own.queued * max(self.accounts.ready_weight / own.weight, 1.0)))
        return Ahead(jobs, self.prompt_tokens * jobs // self.depth, self.output_tokens * jobs // self.depth)

    def prune(self) -> None:
        """Forget queues that nobody is in, and routes that no queue needs."""
        self.queues = {key: queue for key, queue in self.queues.items() if queue.held or queue in self.waiting}
        self.routes = {queue.route.key: queue.route for queue in self.queues.values()}


_NEVER = 10**12
