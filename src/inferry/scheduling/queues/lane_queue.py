"""Lanes and their queues: who waits, in which order."""

from collections.abc import Callable
from math import ceil

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import QueuedAhead
from inferry.domain.routes import BatchKey, RouteKey
from inferry.scheduling.batching.pass_window import FollowerStats
from inferry.scheduling.batching.prefix_groups import PrefixGroups
from inferry.scheduling.batching.sibling_window import SiblingWindows
from inferry.scheduling.overload import OverloadSelector
from inferry.scheduling.placement.route_filter import RouteFilter
from inferry.scheduling.queues.drain_rate import DrainRate
from inferry.scheduling.queues.fair_queue import FairQueue, RunQueue, fair_key
from inferry.scheduling.queues.fair_share import LaneAccounts
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.queues.queued_job import READY, QueuedJob

PREPAID_TOKENS = 4 * QUANTUM_TOKENS
"""How much of what a lane was served in order counts when it is owed something: batch work that had the engine until
now is not owed a turn the moment a burst of live work begins."""


class BacklogCounter:
    """What all lanes have in common: how many queues somebody waits in."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0


class RouteQueue:
    """The jobs of one lane and key: some held for company, the others ready, in fair order.

    While only one run waits there is no order to keep but arrival, and `_single_run` is all there is; `_fair_queue` is
    made when a second one comes. `overtaken` counts the prompt tokens of lower lanes that went since a head of this
    queue last left. `size` counts the ready jobs; none of them needs less than `min_kv_tokens`. `blocked_in_round` is
    the last round of planning that left a head here, `blocked_since_round` the first of those on end;
    `no_preemption_before` one before which preemption need not look again.
    """

    __slots__ = (
        "_fair_queue",
        "_overload_selector",
        "_prefix_groups",
        "_single_run",
        "blocked_in_round",
        "blocked_since_round",
        "followers",
        "held",
        "held_kv_tokens",
        "held_prefill_tokens",
        "lane_queue",
        "min_kv_tokens",
        "no_preemption_before",
        "overtaken",
        "route",
        "sibling_windows",
        "size",
    )

    def __init__(self, lane_queue: "LaneQueue", route: RouteFilter) -> None:
        self.lane_queue = lane_queue
        self.route = route
        self.followers = FollowerStats()
        self.sibling_windows = SiblingWindows(lane_queue.coalesce_s)
        self.held: dict[str, QueuedJob] = {}
        self.held_kv_tokens = 0
        self.held_prefill_tokens = 0
        self.overtaken = 0
        self.no_preemption_before = 0
        self.min_kv_tokens = 0
        self.blocked_in_round = self.blocked_since_round = -2
        self._single_run: RunQueue | None = None
        self._fair_queue: FairQueue | None = None
        self._prefix_groups = PrefixGroups()
        self._overload_selector = OverloadSelector()
        self.size = 0

    def hold(self, entry: QueuedJob) -> None:
        self.held[entry.job.job_id] = entry
        self.held_kv_tokens += entry.kv_tokens
        self.held_prefill_tokens += entry.prefill_tokens

    def unhold(self, entry: QueuedJob) -> None:
        del self.held[entry.job.job_id]
        self.held_kv_tokens -= entry.kv_tokens
        self.held_prefill_tokens -= entry.prefill_tokens

    def head(self) -> QueuedJob | None:
        """The ready job that goes next: of the least served tenant, of its least served run, the first to arrive."""
        fair_queue = self._fair_queue
        if fair_queue is not None:
            return fair_queue.head()
        return None if self._single_run is None else self._single_run.first()

    def select_next(self, head: QueuedJob, now: float) -> QueuedJob:
        """The head, or whoever it gives way to because its own promise is lost and theirs is not."""
        ttft_s = self.lane_queue.ttft_s
        if ttft_s is None or self.size == 1 or self.route.any_pads:
            return head
        return self._overload_selector.select(head, ttft_s, now)

    def behind(self, head: QueuedJob, count: int) -> list[QueuedJob]:
        """A few of those who stand next behind the head, in order."""
        if self._fair_queue is not None:
            nearby = [entry for entry in self._fair_queue.peek(count) if entry is not head]
            nearby.sort(key=fair_key)
            return nearby[:count]
        return [] if self._single_run is None else self._single_run.peek(count + 1)[1:]

    def push(self, entry: QueuedJob) -> bool:
        """Make the job ready, in its place; say whether it is the head now."""
        entry.state = READY
        lane_queue, run = self.lane_queue, entry.run
        run.job_ready(entry.number)
        lane_queue.ready += 1
        lane_queue.cached_head_cost = None
        if entry.job.prefix:
            self._prefix_groups.add(entry)
        self.size += 1
        if lane_queue.ttft_s is not None:
            self._overload_selector.add(entry, self.size)
        if self.size == 1:
            self._single_run = RunQueue(run)
            self._single_run.add(entry)
            self.min_kv_tokens = entry.kv_tokens
            self.overtaken = self.no_preemption_before = 0
            lane_queue.waiting[self] = None
            lane_queue.backlog.waiting += 1
            return True
        if entry.kv_tokens < self.min_kv_tokens:
            self.min_kv_tokens = entry.kv_tokens
        single_run, fair_queue = self._single_run, self._fair_queue
        if single_run is not None:
            if single_run.account is run:
                return single_run.add(entry)
            fair_queue = self._fair_queue = FairQueue(single_run, lane_queue.warm_slices_of)
            self._single_run = None
        assert fair_queue is not None
        return fair_queue.add(entry)

    def remove(self, entry: QueuedJob, was_head: bool = True) -> None:
        """Take out a ready job, whose stage is another by now. The rows close up when they come to its place.

        Its accounts are told by who sends it, or by whoever makes it leave.
        """
        if entry.prefix_group is not None:
            self._prefix_groups.remove(entry, entry.prefix_group)
        lane_queue = self.lane_queue
        lane_queue.ready -= 1
        lane_queue.cached_head_cost = None
        self.size -= 1
        self._overload_selector.sent_tokens += entry.charged_tokens
        if was_head:
            self.overtaken = 0
        if not self.size:
            self._single_run = self._fair_queue = None
            del lane_queue.waiting[self]
            lane_queue.backlog.waiting -= 1
        elif self._single_run is not None:
            self._single_run.remove(entry)
        elif self._fair_queue is not None:
            self._fair_queue.remove(entry)


class LaneQueue:
    """One lane: its policy, its queues, and how many jobs they hold in all.

    `waiting` are the queues with ready jobs; `credit` is what the lane is owed, in prompt tokens, `credit_per_token`
    what it gets for every prompt token of a better lane, and `cached_head_cost` what its first job costs, until
    somebody comes or goes. `below` are the lower lanes that own a share, `above` all better ones. `fill` is the part of
    a worker's room it may fill. `groups` are the worker groups it may use, best first, or None for any. `accounts`
    holds what its tenants were served. `depth` counts the jobs held or ready, and the tokens beside it are theirs.
    `ttft_s` is its first-token promise; `is_batch` says that there is none.
    """

    __slots__ = (
        "above",
        "accounts",
        "backlog",
        "below",
        "cached_head_cost",
        "coalesce_s",
        "credit",
        "credit_per_token",
        "depth",
        "drain",
        "fill",
        "groups",
        "is_batch",
        "lane",
        "max_wait_s",
        "number",
        "output_tokens",
        "policy",
        "preemptible",
        "prompt_tokens",
        "queue_by_route",
        "queue_limit",
        "queues",
        "ready",
        "routes",
        "ttft_s",
        "waiting",
        "warm_slices_of",
        "window",
    )

    def __init__(
        self,
        lane: Lane,
        policy: LanePolicy,
        accounts: LaneAccounts,
        backlog: BacklogCounter,
        warm_slices_of: Callable[[QueuedJob], int],
        groups: tuple[str, ...] | None = None,
    ) -> None:
        self.lane = lane
        self.number = int(lane)
        self.policy = policy
        self.groups = groups
        self.backlog = backlog
        self.warm_slices_of = warm_slices_of
        self.window = policy.window
        self.coalesce_s = policy.coalesce_ms / 1000
        self.max_wait_s = policy.max_wait_ms / 1000
        self.queue_limit = policy.queue_limit
        self.preemptible = policy.preemptible
        self.ttft_s = None if policy.ttft_ms is None else policy.ttft_ms / 1000
        self.is_batch = self.ttft_s is None
        self.fill = 1.0 - policy.reserve
        self.accounts = accounts
        self.queues: dict[RouteKey | BatchKey, RouteQueue] = {}
        self.queue_by_route: dict[RouteKey, RouteQueue] = {}
        self.routes: dict[RouteKey, RouteFilter] = {}
        self.waiting: dict[RouteQueue, None] = {}
        self.depth = self.prompt_tokens = self.output_tokens = 0
        self.ready = 0
        self.credit = 0.0
        self.credit_per_token = policy.share / (1 - policy.share)
        self.above: tuple[LaneQueue, ...] = ()
        self.below: tuple[LaneQueue, ...] = ()
        self.cached_head_cost: int | None = None
        self.drain = DrainRate()

    def queue_for(self, job: InferenceJob, route: RouteFilter) -> RouteQueue:
        """The queue a new job joins. Batch keys split queues only in front of workers that pad."""
        key = job.batch_key if route.any_pads else job.route
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = RouteQueue(self, route)
        if not route.any_pads:
            self.queue_by_route[job.route] = queue
        return queue

    def first(self) -> RouteQueue | None:
        """The queue whose head goes first, among those that some worker serves."""
        if len(self.waiting) == 1:
            queue = next(iter(self.waiting))
            return queue if queue.route.tiers else None
        served = [queue for queue in self.waiting if queue.route.tiers]
        if len(served) < 2:
            return served[0] if served else None
        return min([(fair_key(head), queue) for queue in served if (head := queue.head())], key=lambda pair: pair[0])[1]

    def spend_credit(self, tokens: int) -> None:
        """A job of the lane goes. Whoever is served is owed less; served without being owed, it has paid in advance."""
        if not self.credit_per_token:
            return
        credit = self.credit - tokens
        if credit < -PREPAID_TOKENS:
            if self.credit < -PREPAID_TOKENS:  # what it owes for a job that was larger than a quantum stays owed
                return
            credit = float(-PREPAID_TOKENS)
        self.credit = credit if self.ready or credit < 0 else 0.0

    def head_cost(self) -> int:
        """What the lane must be owed for its first job to go before its betters."""
        if self.cached_head_cost is None:
            queue = self.first()
            head = None if queue is None else queue.head()
            self.cached_head_cost = _UNREACHABLE_COST if head is None else min(head.prefill_tokens, QUANTUM_TOKENS)
        return self.cached_head_cost

    def add_entry(self, job: InferenceJob, number: int, queue: RouteQueue) -> QueuedJob:
        """A job is queued."""
        run = self.accounts.open_run(job.tenant, job.run_id)
        entry = QueuedJob(job, number, queue, run)
        self.depth += 1
        self.prompt_tokens += entry.cold_tokens
        self.output_tokens += job.footprint.output.expected
        run.tenant.queued += 1
        return entry

    def remove_entry(self, entry: QueuedJob) -> None:
        """A job is queued no more."""
        self.depth -= 1
        self.prompt_tokens -= entry.cold_tokens
        self.output_tokens -= entry.job.footprint.output.expected
        entry.run.tenant.queued -= 1

    def ahead(self, tenant: str | None) -> QueuedAhead:
        """What goes before the next job of the tenant: its own jobs, and as many of others as fair share gives them in
        the meantime, never more than there are, each taken for an average one. All there are where no tenant is named.
        """
        if tenant is None:
            return QueuedAhead(self.depth, self.prompt_tokens, self.output_tokens)
        tenant_account = self.accounts.members.get(tenant)
        if tenant_account is None or not tenant_account.queued:
            return QueuedAhead()
        jobs = min(
            self.depth, ceil(tenant_account.queued * max(self.accounts.ready_weight / tenant_account.weight, 1.0))
        )
        return QueuedAhead(jobs, self.prompt_tokens * jobs // self.depth, self.output_tokens * jobs // self.depth)

    def prune(self) -> None:
        """Forget queues that nobody is in, and routes that no queue needs."""
        self.queues = {key: queue for key, queue in self.queues.items() if queue.held or queue in self.waiting}
        self.routes = {queue.route.key: queue.route for queue in self.queues.values()}


_UNREACHABLE_COST = 10**12
