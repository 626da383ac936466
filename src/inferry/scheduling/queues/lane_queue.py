"""The queues of a lane, and the order of jobs within each."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Final

from msgspec.structs import replace

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.plans import QueuedAhead
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.run_split import RunSplit
from inferry.scheduling.batching.pass_window import FollowerStats
from inferry.scheduling.batching.prefix_groups import PrefixGroups
from inferry.scheduling.batching.sibling_window import SiblingWindows
from inferry.scheduling.lane_rules import LaneRules
from inferry.scheduling.overload import OverloadSelector
from inferry.scheduling.placement.filters import Filter
from inferry.scheduling.placement.route_filter import RouteFilter
from inferry.scheduling.placement.worker_groups import WorkerGroupIndex
from inferry.scheduling.queues.arrival_order import ArrivalOrder
from inferry.scheduling.queues.bound_interval import BoundInterval
from inferry.scheduling.queues.fair_queue import FairQueue, RunQueue, fair_key
from inferry.scheduling.queues.fair_share import LaneAccounts
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.queues.queued_job import READY, QueuedJob, QueueKey
from inferry.scheduling.worker_state import WorkerState

PREPAID_TOKENS: Final = 4 * QUANTUM_TOKENS
"""Service in order that counts against a lane's share: batch work that had the engine until now is not owed a turn at
the start of a burst of live work."""


class BacklogCounter:
    """The number of queues with ready jobs, over all lanes."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0


class RouteQueue:
    """The jobs of one lane, settings version and key: some held, the others ready, in fair order.

    A queue with one ready job is `_single_job`: it has no order and no siblings. Jobs of one run are ordered by arrival
    in `_single_run`; the second run makes `_fair_queue`. `overtaken` counts the prompt tokens of lower lanes that went
    since a head of this queue last left. `size` counts the ready jobs; none of them needs less than `min_kv_tokens`.
    `blocked_in_round` is the last round of planning with a blocked head here, `blocked_since_round` the first of that
    series. Preemption does not look here before round `no_preemption_before`. `bound` is what keeps the head from its
    workers, since the queue was last empty; None before that.
    """

    __slots__ = (
        "_arrival_order",
        "_fair_queue",
        "_overload_selector",
        "_prefix_groups",
        "_single_job",
        "_single_run",
        "blocked_in_round",
        "blocked_since_round",
        "bound",
        "followers",
        "held",
        "held_kv_tokens",
        "held_prefill_tokens",
        "key",
        "lane_queue",
        "min_kv_tokens",
        "no_preemption_before",
        "overtaken",
        "route",
        "rules",
        "sibling_windows",
        "size",
    )

    def __init__(self, key: QueueKey, lane_queue: "LaneQueue", rules: LaneRules, route: RouteFilter) -> None:
        self.key = key
        self.lane_queue = lane_queue
        self.rules = rules
        self.route = route
        self.followers = FollowerStats()
        self.sibling_windows = SiblingWindows(self.rules.coalesce_s)
        self.held: dict[str, QueuedJob] = {}
        self.held_kv_tokens = 0
        self.held_prefill_tokens = 0
        self.overtaken = 0
        self.no_preemption_before = 0
        self.min_kv_tokens = 0
        self.blocked_in_round: int | None = None
        self.blocked_since_round: int | None = None
        self.bound: BoundInterval | None = None
        self._single_job: QueuedJob | None = None
        self._single_run: RunQueue | None = None
        self._fair_queue: FairQueue | None = None
        self._prefix_groups = PrefixGroups()
        self._overload_selector = OverloadSelector()
        self._arrival_order = ArrivalOrder()
        self.size = 0

    def is_in_use(self) -> bool:
        """Whether jobs that arrive still join the queue: its rules are in use."""
        version, candidate = self.rules.version, self.lane_queue.candidate
        return version == self.lane_queue.rules.version or (candidate is not None and version == candidate.version)

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
        if self._single_job is not None:
            return self._single_job
        fair_queue = self._fair_queue
        if fair_queue is not None:
            return fair_queue.head()
        return None if self._single_run is None else self._single_run.first()

    def oldest(self) -> QueuedJob | None:
        """The ready job that arrived first."""
        return self._single_job if self._single_job is not None else self._arrival_order.oldest()

    def select_next(self, head: QueuedJob, now: float) -> QueuedJob:
        """The head, or under overload the job that passes it over."""
        ttft_s = self.rules.ttft_s
        if ttft_s is None or self.size == 1 or self.route.any_pads:
            return head
        return self._overload_selector.select(head, ttft_s, now)

    def behind(self, head: QueuedJob, count: int) -> list[QueuedJob]:
        """A few of the jobs behind the head, in order."""
        if self._fair_queue is not None:
            nearby = [entry for entry in self._fair_queue.peek(count) if entry is not head]
            nearby.sort(key=fair_key)
            return nearby[:count]
        return [] if self._single_run is None else self._single_run.peek(count + 1)[1:]

    def push(self, entry: QueuedJob) -> bool:
        """Make the job ready, in its place; say whether it is the head now."""
        entry.state = READY
        entry.bound_when_ready = self.bound
        lane_queue, run = self.lane_queue, entry.run
        run.job_ready(entry.number)
        lane_queue.ready += 1
        lane_queue.is_head_cost_known = False
        self.size += 1
        if self.size == 1:
            self._single_job = entry
            self.min_kv_tokens = entry.kv_tokens
            self.overtaken = self.no_preemption_before = 0
            lane_queue.waiting[self] = None
            lane_queue.backlog.waiting += 1
            return True
        if entry.kv_tokens < self.min_kv_tokens:
            self.min_kv_tokens = entry.kv_tokens
        single_job = self._single_job
        if single_job is not None:
            self._single_job = None
            self._single_run = RunQueue(single_job.run)
            self._single_run.add(single_job)
            self._index(single_job, 1)
        self._index(entry, self.size)
        single_run, fair_queue = self._single_run, self._fair_queue
        if single_run is not None:
            if single_run.account is run:
                return single_run.add(entry)
            fair_queue = self._fair_queue = FairQueue(single_run, lane_queue.cached_slices_of)
            self._single_run = None
        assert fair_queue is not None
        return fair_queue.add(entry)

    def _index(self, entry: QueuedJob, ready: int) -> None:
        """Enter one of `ready` jobs where its siblings and, under overload, the jobs in time are found."""
        self._arrival_order.add(entry, ready)
        if entry.job.prefix:
            self._prefix_groups.add(entry)
        if self.rules.ttft_s is not None:
            self._overload_selector.add(entry, ready)

    def remove(self, entry: QueuedJob, was_head: bool = True) -> None:
        """Take out a job that is no longer ready. Its accounts are the caller's to update."""
        if entry.prefix_group is not None:
            self._prefix_groups.remove(entry, entry.prefix_group)
        entry.bound = self.bound
        lane_queue = self.lane_queue
        lane_queue.ready -= 1
        lane_queue.is_head_cost_known = False
        self.size -= 1
        self._overload_selector.sent_tokens += entry.charged_tokens
        if was_head:
            self.overtaken = 0
        if not self.size:
            if self._single_job is None:
                self._arrival_order.clear()
            self._single_job = None
            self._single_run = self._fair_queue = None
            self.bound = None
            del lane_queue.waiting[self]
            lane_queue.backlog.waiting -= 1
        elif self._single_run is not None:
            self._single_run.remove(entry)
        elif self._fair_queue is not None:
            self._fair_queue.remove(entry)


class LaneQueue:
    """One lane: its rules, its queues, and the jobs they hold in all.

    During a trial of other settings `trial` says which runs have the rules `candidate`; otherwise both are None.
    `waiting` are the queues with ready jobs, `ready` counts those jobs. `credit` is what the lane is owed, in prompt
    tokens. `below` are the lower lanes with a share, `above` all higher lanes. `accounts` holds the service of its
    tenants. `depth` counts the jobs held or ready; `prompt_tokens` and `output_tokens` are theirs. `is_head_cost_known`
    ends with every job that arrives or leaves.
    """

    __slots__ = (
        "_head_cost",
        "above",
        "accounts",
        "backlog",
        "below",
        "cached_slices_of",
        "candidate",
        "credit",
        "depth",
        "is_head_cost_known",
        "lane",
        "latest_queue",
        "output_tokens",
        "prompt_tokens",
        "queue_by_route",
        "queues",
        "ready",
        "routes",
        "rules",
        "trial",
        "waiting",
    )

    def __init__(
        self,
        rules: LaneRules,
        accounts: LaneAccounts,
        backlog: BacklogCounter,
        cached_slices_of: Callable[[QueuedJob], int],
    ) -> None:
        self.lane: Lane = rules.lane
        self.rules = rules
        self.candidate: LaneRules | None = None
        self.trial: RunSplit | None = None
        self.backlog = backlog
        self.cached_slices_of = cached_slices_of
        self.accounts = accounts
        self.queues: dict[QueueKey, RouteQueue] = {}
        self.queue_by_route: dict[RouteKey, RouteQueue] = {}
        self.latest_queue: RouteQueue | None = None
        self.routes: dict[RouteKey, RouteFilter] = {}
        self.waiting: dict[RouteQueue, None] = {}
        self.depth = self.prompt_tokens = self.output_tokens = 0
        self.ready = 0
        self.credit = 0.0
        self.above: tuple[LaneQueue, ...] = ()
        self.below: tuple[LaneQueue, ...] = ()
        self.is_head_cost_known = False
        self._head_cost: int | None = None

    def known_queue(self, job: InferenceJob) -> RouteQueue | None:
        """The queue of the job's route, where batch keys or a trial do not split it. Mostly that of the job before."""
        if self.trial is not None:
            return None
        queue = self.latest_queue
        if queue is None or queue.route.key != job.route:
            queue = self.latest_queue = self.queue_by_route.get(job.route)
        return queue

    def forget_routes(self) -> None:
        """Workers have changed: which queue a job joins is found again."""
        self.queue_by_route.clear()
        self.latest_queue = None
        self.is_head_cost_known = False

    def queue_for(
        self,
        job: InferenceJob,
        filters: Sequence[Filter],
        workers: Mapping[str, WorkerState],
        worker_groups: WorkerGroupIndex,
    ) -> RouteQueue:
        """The queue a new job joins. Batch keys split queues only in front of workers that pad."""
        route = self.routes.get(job.route)
        if route is None:
            route = self.routes[job.route] = RouteFilter(
                job.route, self.rules, filters, workers.values(), worker_groups
            )
        rules = self.rules
        if self.trial is not None and self.candidate is not None and self.trial.takes(job.tenant, job.run_id):
            rules = self.candidate
        key = (rules.version, _batch_key(job, rules) if route.any_pads else job.route)
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = RouteQueue(key, self, rules, route)
        if not route.any_pads and rules is self.rules:
            self.queue_by_route[job.route] = queue
        return queue

    def first(self) -> RouteQueue | None:
        """The queue whose head goes first, among those with workers."""
        if len(self.waiting) == 1:
            queue = next(iter(self.waiting))
            return queue if queue.route.tiers else None
        served = [queue for queue in self.waiting if queue.route.tiers]
        if len(served) < 2:
            return served[0] if served else None
        return min([(fair_key(head), queue) for queue in served if (head := queue.head())], key=lambda pair: pair[0])[1]

    def spend_credit(self, tokens: int) -> None:
        """A job of the lane was served: the lane is owed less, or has paid in advance."""
        if not self.rules.has_share:
            return
        credit = self.credit - tokens
        if credit < -PREPAID_TOKENS:
            if self.credit < -PREPAID_TOKENS:  # the debt for a job larger than a quantum stays
                return
            credit = float(-PREPAID_TOKENS)
        self.credit = credit if self.ready or credit < 0 else 0.0

    def covers_head(self) -> bool:
        """Whether the credit pays for the lane's first job to go before higher lanes; not without a first job."""
        if not self.is_head_cost_known:
            queue = self.first()
            head = None if queue is None else queue.head()
            self._head_cost = None if head is None else min(head.prefill_tokens, QUANTUM_TOKENS)
            self.is_head_cost_known = True
        return self._head_cost is not None and self.credit >= self._head_cost

    def add_entry(self, job: InferenceJob, number: int, queue: RouteQueue) -> QueuedJob:
        """Enter a job that is queued."""
        run = self.accounts.open_run(job.tenant, job.run_id)
        entry = QueuedJob(job, number, queue.rules, queue.key, run)
        entry.is_pooled = queue.route.is_pooled
        self.depth += 1
        self.prompt_tokens += entry.cold_tokens
        self.output_tokens += job.footprint.output.expected
        run.tenant.queued += 1
        return entry

    def remove_entry(self, entry: QueuedJob) -> None:
        """A job is no longer queued."""
        self.depth -= 1
        self.prompt_tokens -= entry.cold_tokens
        self.output_tokens -= entry.job.footprint.output.expected
        entry.run.tenant.queued -= 1

    def ahead(self, tenant: str | None) -> QueuedAhead:
        """What goes before the next job of the tenant: its own jobs, and those that fair share serves meanwhile,
        each of average size. Without a tenant, all that is queued.
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
        """Drop empty queues, and routes without a queue."""
        self.queues = {key: queue for key, queue in self.queues.items() if queue.held or queue in self.waiting}
        self.routes = {queue.route.key: queue.route for queue in self.queues.values()}


def _batch_key(job: InferenceJob, rules: LaneRules) -> BatchKey:
    bucket = rules.prompt_bucket(job.footprint.prompt.expected)
    return job.batch_key if bucket is None else replace(job.batch_key, bucket=bucket)
