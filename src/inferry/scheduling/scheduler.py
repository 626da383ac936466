"""The scheduler: who goes next, with whom, and where.

One owner calls it, from one thread, with the time of its own clock; it never waits and never looks at a clock itself.
All it knows came in through `offer`, `cancel`, `observe`, `forget` and `progress`; all it decides goes out through
`tick`. The opinions live next door: `batching_window` says when, `selection` who is next, `fair_share` whose turn it
is, `lane_shares` what lower lanes are owed, `packing`, `prefix_group` and `sibling_window` who goes together,
`placement` where, `prefill_bucket` how fast, `preemption` who has to leave. `fast_path` is the short way of a job that
meets nobody.
"""

from collections.abc import Mapping

from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy, ReleaseReason
from inferry.domain.plans import BatchPlan, CapacityUse, Ended, FirstToken, JobLocation, Produced, QueuedAhead, Tick
from inferry.domain.routes import RouteKey
from inferry.domain.workers import WorkerView
from inferry.scheduling.batching import batching_window
from inferry.scheduling.batching.packing import WorkerState
from inferry.scheduling.batching.pass_window import PassDurations
from inferry.scheduling.batching.sibling_window import SiblingWindow
from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.fast_path import send_uncontended
from inferry.scheduling.placement.route_filter import RouteFilter, changes_routes, serves
from inferry.scheduling.placement.scorers import Placement
from inferry.scheduling.placement.worker_groups import WorkerGroupIndex
from inferry.scheduling.preemption import Preemption
from inferry.scheduling.queues import service_history
from inferry.scheduling.queues.fair_share import LaneAccounts, Weights, jain_index, weight_lookup
from inferry.scheduling.queues.lane_queue import BacklogCounter, LaneQueue, RouteQueue
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.queues.queued_job import HELD, NOMINATED, PLANNED, REMOVED, UNCONTENDED, QueuedJob
from inferry.scheduling.queues.timers import TimerHeap
from inferry.scheduling.selection import Selector


class Scheduler:
    """Queues jobs and plans them onto workers, inside each worker's room.

    `weights` say how much of a lane a tenant gets beside the others, 1 unless it is named. `groups` name the worker
    groups a lane may use, best first; any for lanes not named. `burst_tokens` is how many prompt tokens may go to a
    worker at once while its prefill rate binds. `fast_path_enabled` may be switched off to compare: what is decided
    must be the same.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        weights: Weights | None = None,
        *,
        groups: Mapping[Lane, tuple[str, ...]] | None = None,
        burst_tokens: int = QUANTUM_TOKENS,
        fast_path_enabled: bool = True,
    ) -> None:
        for lane, policy in lanes.items():
            if not (0 <= policy.share < 1 and 0 <= policy.reserve < 1):
                raise ValueError(f"{lane.name}: share and reserve are at least 0 and less than 1")
        weight_of = weight_lookup(weights or {})
        self._service_history = service_history.ServiceHistory()
        self._placement = Placement()
        self._backlog = BacklogCounter()
        self._lane_queues = tuple(
            LaneQueue(
                lane,
                lanes[lane],
                LaneAccounts(weight_of, self._service_history.record_service),
                self._backlog,
                self._placement.warm_slices,
                (groups or {}).get(lane),
            )
            for lane in sorted(lanes)
        )
        self._lane_queue_of = [
            next((lane_queue for lane_queue in self._lane_queues if lane_queue.lane is lane), None) for lane in Lane
        ]
        self._tick_context = TickContext(burst_tokens)
        self._entries: dict[str, QueuedJob] = {}
        self._workers: dict[str, WorkerState] = {}
        self._queues_with_holds: dict[RouteQueue, None] = {}
        self._pass_durations = PassDurations()
        self._timers = TimerHeap()
        self._worker_groups = WorkerGroupIndex()
        self._selector = Selector(self._lane_queues, self._timers, self._placement, self._tick_context)
        self._changed_workers = self._selector.changed_workers
        self._preemption = Preemption(self._lane_queues)
        self._offer_count = 0
        self._plan_count = 0
        self._uncontended: QueuedJob | None = None
        self._fast_path_enabled = fast_path_enabled
        self._selector.rescans_all_workers = not fast_path_enabled
        # What the next tick has to look at. Without either flag only time can have changed anything.
        self._planning_needed = False
        self._hold_check_needed = False

    # What the owner tells it.

    def offer(self, job: InferenceJob, now: float) -> None:
        """Queue a job, held for company or ready to go. Raises QueueFull when its lane is at the limit.

        A job in a later attempt was let in before, and always is again.
        """
        job_id = job.job_id
        if job_id in self._entries:
            raise ValueError(f"job {job_id} has already been offered")
        lane_queue = self._lane_queue_of[job.lane]
        if lane_queue is None:
            raise ValueError(f"no policy for lane {job.lane.name}")
        if lane_queue.depth >= lane_queue.queue_limit and job.attempt == 1:  # who has been let in is not turned away
            raise QueueFull(
                f"lane {job.lane.name} holds {lane_queue.depth} jobs, which is its limit",
                retry_after_s=lane_queue.drain.seconds_for(lane_queue.depth, now),
            )
        if not lane_queue.depth:
            lane_queue.drain.begin(now)
        self._offer_count += 1
        queue = lane_queue.queue_by_route.get(job.route) or self._queue_for(lane_queue, job)
        entry = self._entries[job_id] = lane_queue.add_entry(job, self._offer_count, queue)
        hold_limit = batching_window.hold_limit(entry, self._pass_durations, now)
        if hold_limit is not None:
            self._hold(entry, hold_limit)
            return
        if job.deadline is not None:
            self._timers.put(entry, job.deadline)
        if not self._backlog.waiting and self._uncontended is None and self._fast_path_enabled:
            entry.state = UNCONTENDED
            self._uncontended = entry
            return
        if self._uncontended is not None:
            self._enqueue_uncontended()
        if queue.push(entry):
            self._planning_needed = True

    def _queue_for(self, lane_queue: LaneQueue, job: InferenceJob) -> RouteQueue:
        route = lane_queue.routes.get(job.route)
        if route is None:
            route = lane_queue.routes[job.route] = RouteFilter(
                job.route, self._workers.values(), self._worker_groups, lane_queue.groups
            )
        return lane_queue.queue_for(job, route)

    def cancel(self, job_id: str) -> JobLocation:
        """A queued job leaves at once. A planned one is counted until it has ended: only its worker can free it."""
        entry = self._entries.get(job_id)
        if entry is None:
            return JobLocation.UNKNOWN
        if entry.state is PLANNED:
            return JobLocation.PLANNED
        self._remove_from_queue(entry)
        return JobLocation.QUEUED

    def observe(self, view: WorkerView, now: float) -> None:
        """Replace the belief about a worker."""
        worker = self._workers.get(view.worker)
        if worker is None:
            worker = self._workers[view.worker] = WorkerState(view.worker)
        old = worker.view
        self._enqueue_uncontended()
        changes = changes_routes(old, view)
        if changes or old is None or old.capacity != view.capacity or old.foreign != view.foreign:
            self._revoke_nominations(worker)
            self._changed_workers[worker] = None
            self._planning_needed = self._hold_check_needed = True
        self._tick_context.now = now
        worker.update_view(view, self._tick_context)
        if changes:
            self._refresh_routes()

    def forget(self, worker: str) -> None:
        """Plan nothing more for the worker. What is in flight there stays counted until it has ended."""
        worker_state = self._workers.get(worker)
        if worker_state is None or worker_state.view is None:
            return
        self._enqueue_uncontended()
        self._revoke_nominations(worker_state)
        worker_state.update_view(None, self._tick_context)
        self._placement.forget(worker_state)
        self._pass_durations.forget(worker)
        if not worker_state.sequences:
            del self._workers[worker]
        self._refresh_routes()

    def progress(
        self, job_id: str, step: FirstToken | Produced | Ended, now: float, attempt: int | None = None
    ) -> None:
        """The job's prefill, or all it used, is free again, or it has written something.

        Late and repeated messages change nothing, nor do those of another attempt where the caller names it.
        """
        entry = self._entries.get(job_id)
        if entry is None or entry.state is not PLANNED or (worker := entry.worker) is None:
            return
        if attempt is not None and attempt != entry.job.attempt:
            return
        # By exact type: asking whether something is an instance of a Struct is slow where it is not.
        if type(step) is Produced:
            # Who comes next may be another by now, but nobody has more room: the next walk is soon enough.
            service_history.produced(entry, step.tokens)
            return
        self._planning_needed = True
        self._changed_workers[worker] = None
        if type(step) is FirstToken:
            if entry.prefill_tokens:
                worker.free_prefill(entry)
                if entry.sibling_window is not None:
                    entry.sibling_window.first_token(entry, now)
                if step.prompt_tokens is not None:
                    service_history.prefilled(entry, step.prompt_tokens)
        elif type(step) is Ended:
            worker.free(entry)
            if worker.pads:
                self._pass_durations.job_left(worker, now)
            if step.prompt_tokens is not None or step.output_tokens is not None:
                service_history.ended(entry, step)
            if entry.sibling_window is not None:
                entry.sibling_window.ended(entry)
            entry.run.ended()
            del self._entries[job_id]
            if not worker.sequences:
                self._hold_check_needed = True
                if worker.view is None:
                    del self._workers[worker.name]

    # What it decides.

    def tick(self, now: float) -> Tick:
        """Everything that can be decided now. A second tick at the same instant decides nothing."""
        timer_heap = self._timers.heap
        expired = self._process_timers(now) if timer_heap and timer_heap[0][0] <= now else ()
        if self._hold_check_needed:
            self._hold_check_needed = False
            if self._queues_with_holds:
                self._release_needless_holds()
        tick_context = self._tick_context
        plans: tuple[BatchPlan, ...] = ()
        evictions: tuple[InferenceJob, ...] = ()
        if self._uncontended is not None:
            plans = self._send_uncontended(self._uncontended, now)
        if self._planning_needed or (tick_context.retry_at is not None and tick_context.retry_at <= now):
            self._planning_needed = False
            tick_context.start(now)
            if self._backlog.waiting or self._preemption.nominating_workers:
                plans, evictions = self._plan_ready_jobs(now)
            else:
                self._changed_workers.clear()
        wake_at = self._timers.next() if self._timers.heap else None
        retry_at = tick_context.retry_at
        if retry_at is not None and (wake_at is None or retry_at < wake_at):
            wake_at = retry_at
        return Tick(plans, evictions, expired, wake_at)

    # What it shows.

    @property
    def queued(self) -> int:
        return sum(lane_queue.depth for lane_queue in self._lane_queues)

    @property
    def in_flight(self) -> int:
        return len(self._entries) - self.queued

    def depths(self) -> dict[Lane, int]:
        """Queued jobs by lane."""
        return {lane_queue.lane: lane_queue.depth for lane_queue in self._lane_queues}

    def service(self) -> Mapping[str, int]:
        """Tokens served to every tenant since the start, as far as they are known."""
        served = dict(self._service_history.served)
        for lane_queue in self._lane_queues:
            for name, tenant in lane_queue.accounts.members.items():
                if tenant.served or name in served:
                    served[name] = served.get(name, 0) + tenant.served
        return served

    def jain_index(self, lane: Lane | None = None) -> float:
        """Jain's index of the tokens served, over their weights, to tenants that have work now; of one lane or all.

        One lane is asked for what it served since those tenants' accounts were opened, all of them for everything.
        """
        lane_queues = [lane_queue for lane_queue in self._lane_queues if lane is None or lane_queue.lane == lane]
        busy = [
            tenant for lane_queue in lane_queues for tenant in lane_queue.accounts.members.values() if tenant.active
        ]
        if lane is not None:
            return jain_index(tenant.served / tenant.weight for tenant in busy)
        service = self.service()
        return jain_index(
            service.get(name, 0) / weight for name, weight in {account.name: account.weight for account in busy}.items()
        )

    def ahead(self, lane: Lane, tenant: str | None = None) -> QueuedAhead:
        """What is queued before a job of this lane that would come now: all of better lanes, and of its own lane what
        fair share lets go before the tenant's next job, or all of it where no tenant is named.
        """
        parts = [
            lane_queue.ahead(tenant if lane_queue.lane == lane else None)
            for lane_queue in self._lane_queues
            if lane_queue.lane <= lane
        ]
        return QueuedAhead(
            sum([used_fraction.jobs for used_fraction in parts]),
            sum([used_fraction.prompt_tokens for used_fraction in parts]),
            sum([used_fraction.output_tokens for used_fraction in parts]),
        )

    def use(self, worker: str) -> CapacityUse:
        """What this gateway's jobs in flight take up on the worker."""
        worker_state = self._workers.get(worker)
        return CapacityUse() if worker_state is None else worker_state.own_use()

    def has_route(self, route: RouteKey) -> bool:
        """Whether some worker serves the route, up or not."""
        return any(
            worker_state.view is not None and serves(worker_state.view, route)
            for worker_state in self._workers.values()
        )

    # Holding and releasing.

    def _hold(self, entry: QueuedJob, latest_at: float) -> None:
        queue = entry.queue
        until, entry.reason = batching_window.hold_expiry(entry.job, queue.lane_queue, latest_at)
        self._timers.put(entry, until)
        queue.hold(entry)
        self._queues_with_holds[queue] = None
        if batching_window.is_full(queue):
            self._release(queue, ReleaseReason.SIZE)

    def _release(self, queue: RouteQueue, reason: ReleaseReason, sibling_window: SiblingWindow | None = None) -> None:
        """Let everybody who is held in the queue go together, or one family of them."""
        for entry in tuple(queue.held.values()):
            if sibling_window is None or entry.sibling_window is sibling_window:
                self._unhold(entry)
                self._make_ready(entry, reason)

    def _unhold(self, entry: QueuedJob) -> None:
        queue = entry.queue
        queue.unhold(entry)
        if not queue.held:
            del self._queues_with_holds[queue]

    def _make_ready(self, entry: QueuedJob, reason: ReleaseReason) -> None:
        entry.reason = reason
        deadline = entry.job.deadline
        if deadline is not None:
            self._timers.put(entry, deadline)
        elif entry.due is not None:
            self._timers.drop(entry)
        self._enqueue_uncontended()
        if entry.queue.push(entry):
            self._planning_needed = True

    def _enqueue_uncontended(self) -> None:
        """A job that was alone is so no more, or will be somewhere else: it goes into its queue."""
        entry, self._uncontended = self._uncontended, None
        if entry is not None:
            entry.queue.push(entry)
            self._planning_needed = True

    def _remove_from_queue(self, entry: QueuedJob) -> None:
        self._enqueue_uncontended()
        if entry.state is HELD:
            self._unhold(entry)
            entry.state = REMOVED
        else:
            self._planning_needed = True
            if entry.state is NOMINATED:
                assert entry.worker is not None
                self._changed_workers[entry.worker] = None
                self._preemption.cancel(entry)
                entry.state = REMOVED
            else:
                was_head = entry.queue.head() is entry
                entry.state = REMOVED
                entry.run.job_left()
                entry.queue.remove(entry, was_head)
        self._timers.drop(entry)
        entry.queue.lane_queue.remove_entry(entry)
        entry.run.ended()
        del self._entries[entry.job.job_id]

    def _process_timers(self, now: float) -> tuple[InferenceJob, ...]:
        """End the holds and the jobs whose time has come, in order of time; return the jobs that expired."""
        expired = []
        while (entry := self._timers.pop(now)) is not None:
            if entry.state is not HELD:
                self._remove_from_queue(entry)
                expired.append(entry.job)
            elif entry.reason is ReleaseReason.MAX_WAIT:
                self._unhold(entry)
                self._make_ready(entry, ReleaseReason.MAX_WAIT)
            else:
                self._release(entry.queue, entry.reason, entry.sibling_window)
        return tuple(expired)

    def _release_needless_holds(self) -> None:
        """Workers have changed: release jobs that have nothing to wait for any more."""
        for queue in tuple(self._queues_with_holds):
            if not batching_window.should_keep_holding(queue):
                self._release(queue, ReleaseReason.IMMEDIATE)
            elif batching_window.is_full(queue):
                self._release(queue, ReleaseReason.SIZE)

    # Planning.

    def _send_uncontended(self, entry: QueuedJob, now: float) -> tuple[BatchPlan, ...]:
        """Plan the only job there is, if it finds room; else it takes its place in its queue."""
        self._tick_context.now = now
        worker = (
            None if self._preemption.nominating_workers else send_uncontended(entry, self._placement, self._timers, now)
        )
        if worker is None:
            self._enqueue_uncontended()
            return ()
        self._uncontended = None
        self._plan_count += 1
        job = entry.job
        padded_tokens = None
        if worker.pads:
            padded_tokens = job.footprint.prompt.expected
            self._pass_durations.record_start(worker, 1, now)
        plan = BatchPlan(
            plan_id=self._plan_count,
            worker=worker.name,
            jobs=(job,),
            reason=entry.reason,
            formed_at=now,
            padded_tokens=padded_tokens,
        )
        return (plan,)

    def _plan_ready_jobs(self, now: float) -> tuple[tuple[BatchPlan, ...], tuple[InferenceJob, ...]]:
        preemption = self._preemption
        drafts = self._selector.plan_ready_jobs(
            preemption.ready_nominees(self._changed_workers) if preemption.nominating_workers else ()
        )
        evicted = preemption.select_victims() if self._backlog.waiting else ()
        plans = []
        for draft in drafts:
            self._plan_count += 1
            plans.append(draft.plan(self._plan_count, now))
            if draft.worker.pads:
                self._pass_durations.record_start(draft.worker, len(draft.jobs), now)
        return tuple(plans), tuple([entry.job for entry in evicted]) if evicted else ()

    def _revoke_nominations(self, worker: WorkerState) -> None:
        if worker.nominated:
            self._planning_needed = True
            for entry in self._preemption.revoke_nominations(worker):
                entry.queue.push(entry)

    # Routes.

    def _refresh_routes(self) -> None:
        """Workers came, went or changed their kind. Rare, so it is also when unused routes and queues are dropped."""
        self._worker_groups.clear()
        for lane_queue in self._lane_queues:
            # Jobs that were promised room stand in no queue and may come back to theirs.
            if not self._preemption.nominating_workers:
                lane_queue.prune()
            lane_queue.queue_by_route.clear()
            lane_queue.cached_head_cost = None
            for route in lane_queue.routes.values():
                route.refresh(self._workers.values(), self._worker_groups)
        self._selector.reset_blocked()
        self._planning_needed = self._hold_check_needed = True
