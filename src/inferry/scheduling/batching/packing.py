"""Who goes together: what a worker has room for, and how jobs that go to it at once become plans.

Room is counted in three currencies that are held until given back: sequences, KV tokens at their predicted peak, and
prompt tokens in prefill. The fourth, prompt tokens per second, is `prefill_bucket`'s.
"""

from math import inf
from typing import TYPE_CHECKING

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan, CapacityUse
from inferry.domain.workers import WorkerView
from inferry.scheduling.capacity.prefill_bucket import LATENCY_LANES, NO_LANE, PrefillTokenBucket, TickContext
from inferry.scheduling.queues.queued_job import QueuedJob

if TYPE_CHECKING:
    from inferry.scheduling.placement.worker_groups import WorkerGroup

_IMMEDIATE = ReleaseReason.IMMEDIATE
_MAX_WAIT = ReleaseReason.MAX_WAIT


ALMOST_FULL = 0.999
"""The load of a worker that is full of what keeps no better job out."""


class WorkerState:
    """A worker as the scheduler sees it: the latest belief, and everything in use there, foreign work included.

    A worker whose room is nothing in some currency `has_no_capacity`. `load` is what `compute_load` found, or None
    since something changed; `worker_groups` are told of that. `used_fraction` is the part in use of the currency that
    is used most: a lane that may fill no more than that has no room. The state outlives its view while jobs are in
    flight, so that a worker that comes back is not overfilled.

    `prefill_bucket` is there only when the view names a rate. `best_decoding_lane` is the best lane that has a live
    sequence decoding, or NOBODY; the pace binds lanes below it. `closed_in_walk` is the walk in which the worker is
    kept for somebody, from lane `closed_from_lane` on down. `preemption_candidates` are the jobs of preemptible lanes,
    latest last; those `evicting` are counted until they have ended. `nominated` are jobs that wait for that: they are
    counted here as well, so that nobody else takes their room.
    """

    __slots__ = (
        "batch_limit",
        "best_decoding_lane",
        "closed_from_lane",
        "closed_in_walk",
        "decoding",
        "drafts",
        "evicting",
        "evicting_kv_tokens",
        "has_no_capacity",
        "kv_limit",
        "kv_tokens",
        "load",
        "name",
        "nominated",
        "pads",
        "preemption_candidates",
        "prefill_ahead",
        "prefill_bucket",
        "prefill_limit",
        "prefill_tokens",
        "sequence_limit",
        "sequences",
        "used_fraction",
        "view",
        "worker_groups",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefill_bucket: PrefillTokenBucket | None = None
        self.decoding = [0] * len(Lane)
        self.best_decoding_lane: int = NO_LANE
        self.preemption_candidates: dict[QueuedJob, None] = {}
        self.evicting: dict[QueuedJob, None] = {}
        self.evicting_kv_tokens = 0
        self.nominated: dict[QueuedJob, None] = {}
        self.view: WorkerView | None = None
        self.pads = self.has_no_capacity = False
        self.sequences = self.kv_tokens = self.prefill_tokens = 0
        self.sequence_limit = self.kv_limit = self.prefill_limit = self.batch_limit = inf
        self.prefill_ahead = [0] * len(Lane)
        self.drafts: list[Draft] = []
        self.closed_in_walk = 0
        self.closed_from_lane = 0
        self.worker_groups: list[WorkerGroup] = []
        self.load: float | None = None
        self.used_fraction = 0.0

    def update_view(self, view: WorkerView | None, tick_context: TickContext) -> None:
        """Replace the view; what this gateway has in flight is counted on."""
        own = self._counted_use()
        self.view = view
        self.sequences, self.kv_tokens, self.prefill_tokens = own.sequences, own.kv_tokens, own.prefill_tokens
        if view is not None:
            self.pads = view.pads
            self.sequences += view.foreign.running + view.foreign.waiting
            self.kv_tokens += view.foreign.kv_tokens
            self.sequence_limit = _limit(view.capacity.sequences)
            self.batch_limit = _limit(view.capacity.batch_sequences)
            self.kv_limit = _limit(view.capacity.kv_tokens)
            self.prefill_limit = _limit(view.capacity.prefill_tokens)
            self.has_no_capacity = min(self.sequence_limit, self.kv_limit, self.prefill_limit) <= 0
            rate = view.capacity.prefill_tokens_per_s
            if rate is None:
                self.prefill_bucket = None
            elif self.prefill_bucket is None:
                self.prefill_bucket = PrefillTokenBucket(tick_context, rate)
            else:
                self.prefill_bucket.set_rate(rate)
        for worker_group in self.worker_groups:
            worker_group.kv_limit = None
        self.invalidate_load()

    def own_use(self) -> CapacityUse:
        """What was sent there and has not ended."""
        own = self._counted_use()
        for entry in self.nominated:
            own = CapacityUse(
                own.sequences - 1, own.kv_tokens - entry.kv_tokens, own.prefill_tokens - entry.prefill_tokens
            )
        return own

    def _counted_use(self) -> CapacityUse:
        foreign = None if self.view is None else self.view.foreign
        if foreign is None:
            return CapacityUse(self.sequences, self.kv_tokens, self.prefill_tokens)
        return CapacityUse(
            self.sequences - foreign.running - foreign.waiting,
            self.kv_tokens - foreign.kv_tokens,
            self.prefill_tokens,
        )

    # What there is room for.

    def accepts(self, entry: QueuedJob, fill: float) -> bool:
        """Whether the job may go there now: it has place in the part `fill` of the room, and the pace allows it."""
        if self.sequences >= self.sequence_limit * fill:
            return False
        if self.sequences >= self.batch_limit and entry.queue.lane_queue.is_batch:
            return False
        used, limit = self.prefill_ahead[entry.lane], self.prefill_limit
        if used + entry.prefill_tokens > limit * fill and (used or limit <= 0):
            return False
        used, limit = self.kv_tokens, self.kv_limit
        if used + entry.kv_tokens > limit * fill and (used or limit <= 0):
            return False
        if self.pads and not self._can_join_pass(entry):
            return False
        prefill_bucket = self.prefill_bucket
        return (
            prefill_bucket is None
            or entry.lane <= self.best_decoding_lane
            or prefill_bucket.allows(entry.prefill_tokens, fill)
        )

    def is_only_rate_limited(self, entry: QueuedJob, fill: float) -> bool:
        """Whether a job that the worker does not take waits for nothing but time."""
        return (
            self.prefill_bucket is not None
            and entry.lane > self.best_decoding_lane
            and not self.is_full_for(entry, fill)
            and self.has_prefill_capacity(entry, fill)
            and (not self.pads or self._can_join_pass(entry))
        )

    def is_full_for(self, entry: QueuedJob, fill: float) -> bool:
        """Whether sequences or KV keep the job out: what only the end of another job can change.

        A job that is larger than all of a currency enters while that is unused.
        """
        if self.sequences >= self.sequence_limit * fill:
            return True
        if self.sequences >= self.batch_limit and entry.queue.lane_queue.is_batch:
            return True
        used, limit = self.kv_tokens, self.kv_limit
        return used + entry.kv_tokens > limit * fill and (used > 0 or limit <= 0)

    def has_prefill_capacity(self, entry: QueuedJob, fill: float) -> bool:
        used, limit = self.prefill_ahead[entry.lane], self.prefill_limit
        return used + entry.prefill_tokens <= limit * fill or (not used and limit > 0)

    def accepts_any(self, min_kv_tokens: int, fill: float) -> bool:
        """Whether a job that needs no more KV than that, and next to no prefill, could go there."""
        used, limit = self.kv_tokens, self.kv_limit
        return (
            not self.pads
            and self.sequences < self.sequence_limit * fill
            and (used + min_kv_tokens <= limit * fill or (not used and limit > 0))
            and self.prefill_ahead[0] < self.prefill_limit * fill
        )

    def _can_join_pass(self, entry: QueuedJob) -> bool:
        """Nobody can join a padded pass that runs, so whoever may wait for company waits for its end, as for room. Jobs
        of a lane that holds nobody go at once and queue up in the worker.
        """
        return not self.sequences or entry.queue.lane_queue.window == "off" or self.has_draft_for(entry)

    def has_draft_for(self, entry: QueuedJob) -> bool:
        return any(draft.accepts(entry) for draft in self.drafts)

    # How full it is.

    def invalidate_load(self) -> None:
        """Its load has to be found out again."""
        if self.load is not None:
            self.load = None
            for worker_group in self.worker_groups:
                worker_group.stale.append(self)

    def compute_load(self) -> float:
        """The largest part in use over the currencies; where nothing is, more sequences are still more load."""
        if self.has_no_capacity:
            load = inf
        else:
            load = self.sequences / self.sequence_limit
            if (used_fraction := self.kv_tokens / self.kv_limit) > load:
                load = used_fraction
            if (used_fraction := self.prefill_ahead[0] / self.prefill_limit) > load:
                load = used_fraction
        self.used_fraction = load
        if load < ALMOST_FULL and self.prefill_tokens:
            # Prompts of lower lanes keep no better job out, but they are load.
            used_fraction = self.prefill_tokens / self.prefill_limit
            if used_fraction > load:
                load = used_fraction if used_fraction < ALMOST_FULL else ALMOST_FULL
        if load == 0.0 and self.sequences:
            load = 1.0 - 1.0 / (1 + self.sequences)
        self.load = load
        return load

    # What comes and goes.

    def admit(self, entry: QueuedJob) -> None:
        self.sequences += 1
        self.kv_tokens += entry.kv_tokens
        self._count_prefill(entry.lane, entry.prefill_tokens)
        if self.prefill_bucket is not None and self.best_decoding_lane != NO_LANE:
            if entry.lane > self.best_decoding_lane:
                self.prefill_bucket.spend(entry.prefill_tokens)
            else:
                self.prefill_bucket.spend_unpaced(entry.prefill_tokens)
        if self.load is not None:
            self.invalidate_load()

    def undo_admit(self, entry: QueuedJob) -> None:
        """Undo `admit` for a job that was never sent."""
        del self.nominated[entry]
        self.sequences -= 1
        self.kv_tokens -= entry.kv_tokens
        self._count_prefill(entry.lane, -entry.prefill_tokens)
        self.invalidate_load()

    def _count_prefill(self, lane: int, tokens: int) -> None:
        """Prompts are ahead of jobs of their own and lower lanes only: nobody waits for room that lower lanes hold."""
        self.prefill_tokens += tokens
        ahead = self.prefill_ahead
        ahead[2] += tokens
        if lane < 2:
            ahead[1] += tokens
            if not lane:
                ahead[0] += tokens

    def free_prefill(self, entry: QueuedJob) -> None:
        """The job's first token is there."""
        lane = entry.lane
        self._count_prefill(lane, -entry.prefill_tokens)
        entry.prefill_tokens = 0
        self.decoding[lane] += 1
        if lane < self.best_decoding_lane and lane in LATENCY_LANES:
            self.best_decoding_lane = lane
        if self.load is not None:
            self.invalidate_load()

    def _update_best_decoding_lane(self) -> None:
        self.best_decoding_lane = NO_LANE
        for lane in reversed(LATENCY_LANES):
            if self.decoding[lane]:
                self.best_decoding_lane = lane

    def free(self, entry: QueuedJob) -> None:
        """The job has ended."""
        self.sequences -= 1
        self.kv_tokens -= entry.kv_tokens
        if entry.prefill_tokens:
            self._count_prefill(entry.lane, -entry.prefill_tokens)
        else:
            lane = entry.lane
            self.decoding[lane] -= 1
            if lane == self.best_decoding_lane and not self.decoding[lane]:
                self._update_best_decoding_lane()
        if self.preemption_candidates:
            self.preemption_candidates.pop(entry, None)
        if self.evicting and entry in self.evicting:
            del self.evicting[entry]
            self.evicting_kv_tokens -= entry.kv_tokens
        if self.load is not None:
            self.invalidate_load()


def _limit(tokens: int | None) -> float:
    return inf if tokens is None else tokens


class Draft:
    """A plan while a tick forms it."""

    __slots__ = ("jobs", "max_batch", "reason", "worker")

    def __init__(self, worker: WorkerState, first: QueuedJob) -> None:
        self.worker = worker
        self.reason = first.reason
        self.max_batch = first.queue.lane_queue.policy.max_batch
        self.jobs: list[InferenceJob] = [first.job]

    def accepts(self, entry: QueuedJob) -> bool:
        """Whether the job may share the plan. In a padded pass company counts for more than why it was released."""
        if self.reason is _MAX_WAIT or entry.reason is _MAX_WAIT:
            return False
        if self.worker.pads:
            return len(self.jobs) < self.max_batch and self.jobs[0].batch_key == entry.job.batch_key
        return self.reason is entry.reason

    def plan(self, plan_id: int, now: float) -> BatchPlan:
        return BatchPlan(
            plan_id=plan_id,
            worker=self.worker.name,
            jobs=tuple(self.jobs),
            reason=self.reason,
            formed_at=now,
            padded_tokens=max(job.footprint.prompt.expected for job in self.jobs) if self.worker.pads else None,
        )


def add_to_draft(entry: QueuedJob, worker: WorkerState, drafts: list[Draft]) -> None:
    """Write a job that its worker has taken into the draft that takes it, or into a new one."""
    worker_drafts = worker.drafts
    if worker_drafts and not worker.pads and entry.reason is _IMMEDIATE is worker_drafts[-1].reason:
        worker_drafts[-1].jobs.append(entry.job)  # as nearly always
        return
    for draft in worker_drafts:
        if draft.accepts(entry):
            draft.jobs.append(entry.job)
            return
    draft = Draft(worker, entry)
    worker_drafts.append(draft)
    drafts.append(draft)
