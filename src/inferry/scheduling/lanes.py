"""Lanes and their queues: who waits, in which order."""

from collections.abc import Callable

from inferry.domain.jobs import BatchKey, InferenceJob, Lane, LanePolicy, RouteKey
from inferry.domain.plans import Ahead
from inferry.scheduling.drain import DrainRate
from inferry.scheduling.fairness import Account
from inferry.scheduling.flows import Flow, Order, Party, order
from inferry.scheduling.kin import Families
from inferry.scheduling.placing.routes import Route
from inferry.scheduling.tickets import READY, Ticket


class Queue:
    """The jobs of one lane and key: some held for company, the others ready, in fair order.

    `overtaken` counts the prompt tokens of lower lanes that went since a head of this queue last left. `size` counts
    the ready jobs.
    """

    __slots__ = (
        "_families",
        "_parties",
        "held",
        "held_kv_tokens",
        "held_prefill_tokens",
        "line",
        "overtaken",
        "route",
        "size",
    )

    def __init__(self, line: "Line", route: Route) -> None:
        self.line = line
        self.route = route
        self.held: dict[str, Ticket] = {}
        self.held_kv_tokens = 0
        self.held_prefill_tokens = 0
        self.overtaken = 0
        self._parties: Order[Party] = Order()
        self._families = Families()
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
        party = self._parties.first()
        if party is None or (flow := party.flows.first()) is None:
            return None
        return flow.first()

    def behind(self, head: Ticket, count: int) -> list[Ticket]:
        """A few of those who stand next behind the head, in order."""
        near = [
            ticket
            for party in self._parties.nearest(count)
            for flow in party.flows.nearest(count)
            for ticket in flow.nearest(2)
            if ticket is not head
        ]
        return sorted(near, key=order)[:count]

    def push(self, ticket: Ticket, warmth: int = 0) -> bool:
        """Make the job ready, in its place; say whether it is the head now. `warmth` decides between equals."""
        ticket.stage = READY
        line, run, tenant = self.line, ticket.run, ticket.tenant
        run.entered(ticket.number)
        party = self._parties.get(tenant)
        if party is None:
            party = Party(tenant)
            party.warmth = warmth
            self._parties.add(party)
        flow = party.flows.get(run)
        if flow is None:
            flow = Flow(run, party)
            flow.warmth = warmth
            party.flows.add(flow)
        flow.add(ticket)
        ticket.flow = flow
        party.size += 1
        self.size += 1
        line.ready += 1
        if ticket.job.prefix:
            self._families.add(ticket)
        if self.size == 1:
            line.waiting[self] = None
            self.overtaken = 0
        elif self.head() is not ticket:
            return False
        line.first_seen = None
        return True

    def remove(self, ticket: Ticket, was_head: bool = True) -> None:
        """Take out a ready job, whose stage is another by now. The rows close up when they come to its place."""
        flow = ticket.flow
        assert flow is not None
        party = flow.party
        flow.size -= 1
        party.size -= 1
        self.size -= 1
        ticket.flow = None
        ticket.run.left()
        if ticket.kin is not None:
            self._families.remove(ticket.kin)
            ticket.kin = None
        line = self.line
        line.ready -= 1
        if not self.size:
            del line.waiting[self]
        if was_head:
            self.overtaken = 0
        else:
            flow.compact()
            party.flows.compact(party.size)
            self._parties.compact(self.size)
        line.first_seen = None


class Line:
    """One lane: its policy, its queues, and how many jobs they hold in all.

    `waiting` are the queues with ready jobs; `credit` is what the lane is owed, in prompt tokens; `fill` is the part of
    a worker's room it may fill. `groups` are the worker groups it may use, best first, or None for any. `accounts`
    holds what its tenants were served. `first_seen` is the answer of `first`, until a head or the workers change.
    """

    __slots__ = (
        "accounts",
        "coalesce_s",
        "credit",
        "depth",
        "drain",
        "fill",
        "first_seen",
        "groups",
        "lane",
        "max_wait_s",
        "policy",
        "queues",
        "ready",
        "routes",
        "waiting",
        "weight_of",
        "window",
    )

    def __init__(
        self,
        lane: Lane,
        policy: LanePolicy,
        groups: tuple[str, ...] | None = None,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        self.lane = lane
        self.policy = policy
        self.groups = groups
        self.weight_of = weight_of
        self.window = policy.window
        self.coalesce_s = policy.coalesce_ms / 1000
        self.max_wait_s = policy.max_wait_ms / 1000
        self.fill = 1.0 - policy.reserve
        self.accounts = Account()
        self.queues: dict[RouteKey | BatchKey, Queue] = {}
        self.routes: dict[RouteKey, Route] = {}
        self.waiting: dict[Queue, None] = {}
        self.depth = 0
        self.ready = 0
        self.credit = 0.0
        self.drain = DrainRate()
        self.first_seen: Queue | None = None

    def ticket_for(self, job: InferenceJob, number: int, route: Route) -> Ticket:
        """A ticket for a new job, in the queue it joins. Batch keys split queues only in front of workers that pad."""
        key = job.batch_key if route.some_pad else job.route
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = Queue(self, route)
        accounts, name = self.accounts, job.tenant
        tenant = accounts.members.get(name)
        if tenant is None:
            tenant = accounts.members[name] = Account(name, accounts, number, self.weight_of(name))
        run = tenant.members.get(job.run_id)
        if run is None:
            run = tenant.members[job.run_id] = Account(job.run_id, tenant, number)
        run.joined()
        return Ticket(job, number, queue, tenant, run)

    def count(self, ticket: Ticket, sign: int) -> None:
        """A job is queued in the lane, or is so no more."""
        self.depth += sign
        prompt, output = sign * ticket.cold_tokens, sign * ticket.job.footprint.output.expected
        for account in (self.accounts, ticket.tenant):
            account.queued += sign
            account.queued_prompt_tokens += prompt
            account.queued_output_tokens += output

    def ahead(self) -> Ahead:
        """All that is queued in the lane."""
        lane = self.accounts
        return Ahead(lane.queued, lane.queued_prompt_tokens, lane.queued_output_tokens)

    def first(self) -> Queue | None:
        """The queue whose head goes first, among those that some worker serves."""
        if self.first_seen is None:
            served = [(order(head), queue) for queue in self.waiting if queue.route.workers and (head := queue.head())]
            self.first_seen = min(served, key=lambda pair: pair[0])[1] if served else None
        return self.first_seen

    def prune(self) -> None:
        """Forget queues that nobody is in, and routes that no queue needs."""
        self.queues = {key: queue for key, queue in self.queues.items() if queue.held or queue in self.waiting}
        self.routes = {queue.route.key: queue.route for queue in self.queues.values()}
