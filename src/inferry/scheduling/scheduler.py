"""The scheduler: which job goes next, with which others, and to which worker.

One owner calls it from one thread, with the time of its own clock. It never waits and reads no clock. All it knows came
in through `offer`, `cancel`, `observe`, `forget` and `progress`; all it decides goes out through `tick`. The decisions
live next door: `batching` says when a job goes and with which others, `queues` in which order, `placement` where,
`capacity` how fast, `preemption` which running job leaves. `selection` is the path through them, `rules` the wiring.
"""

from collections.abc import Mapping

from inferry.domain.decisions import SESSION_PAUSE
from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy, ReleaseReason
from inferry.domain.plans import BatchPlan, Ended, FirstToken, JobLocation, Produced, Tick
from inferry.domain.workers import WorkerView
from inferry.scheduling.batching import batching_window
from inferry.scheduling.batching.pass_window import PassDurations
from inferry.scheduling.batching.sibling_window import SiblingWindow
from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.decision_record import decision_of
from inferry.scheduling.lane_switch import LaneTrial, make_lane_queues, switch_lanes
from inferry.scheduling.placement.borrowing import Borrowing
from inferry.scheduling.placement.pick import Picker
from inferry.scheduling.placement.route_filter import changes_routes
from inferry.scheduling.placement.worker_groups import WorkerGroupIndex
from inferry.scheduling.preemption import Preemption
from inferry.scheduling.queues import service_history
from inferry.scheduling.queues.fair_share import Weights
from inferry.scheduling.queues.lane_queue import BacklogCounter, RouteQueue
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.queues.queued_job import HELD, NOMINATED, PAUSED, PLANNED, REMOVED, QueuedJob
from inferry.scheduling.queues.timers import TimerHeap
from inferry.scheduling.rules import FILTERS, SCORERS, hold_rules
from inferry.scheduling.scheduler_state import SchedulerState
from inferry.scheduling.selection import Selector
from inferry.scheduling.sessions import SessionLimits
from inferry.scheduling.worker_state import WorkerState


class Scheduler(SchedulerState):
    """Queues jobs and plans them onto workers, within each worker's capacity.

    `weights` say how much of a lane a tenant gets beside others; 1 unless it is named. `burst_tokens` is how many
    prompt tokens may go to a worker at once while its prefill rate binds. `rescans_all_workers` tries every blocked job
    on every worker in every round, for comparison: the decisions are the same. With `sessions`, runs pause while their
    KV does not fit.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        weights: Weights | None = None,
        *,
        burst_tokens: int = QUANTUM_TOKENS,
        rescans_all_workers: bool = False,
        sessions: SessionLimits | None = None,
    ) -> None:
        super().__init__(sessions)
        self._picker = Picker(SCORERS)
        self._backlog = BacklogCounter()
        self._lane_queues = make_lane_queues(
            lanes, weights, self._service_history.record_service, self._backlog, self._picker.cached_slices
        )
        by_lane = {lane_queue.lane: lane_queue for lane_queue in self._lane_queues}
        self._lane_queue_of = [by_lane.get(lane) for lane in Lane]
        self._tick_context = TickContext(burst_tokens)
        self._queues_with_holds: dict[RouteQueue, None] = {}
        self._pass_durations = PassDurations()
        self._hold_rules = hold_rules(self._pass_durations)
        self._timers = TimerHeap()
        self._worker_groups = WorkerGroupIndex()
        self._selector = Selector(self._lane_queues, self._workers, self._timers, self._picker, self._tick_context)
        self._selector.rescans_all_workers = rescans_all_workers
        self._changed_workers = self._selector.changed_workers
        self._preemption = Preemption(self._lane_queues, self._workers)
        self._borrowing = Borrowing(self._lane_queues)
        self._offer_count = self._plan_count = 0
        # What the next tick has to look at. Without either flag only time can have changed anything.
        self._planning_needed = self._hold_check_needed = False

    # What the owner tells it.

    def offer(self, job: InferenceJob, now: float, *, is_admitted: bool = False) -> None:
        """Queue a job, held for others or ready to go. Raises QueueFull at its lane's limit, unless it was admitted
        before or is a retry. The error names no retry time: queue admission has the drain rates and checks first.
        """
        job_id = job.job_id
        if job_id in self._entries:
            raise ValueError(f"job {job_id} has already been offered")
        lane_queue = self._lane_queue_of[job.lane]
        if lane_queue is None:
            raise ValueError(f"no policy for lane {job.lane.name}")
        if lane_queue.depth >= lane_queue.rules.queue_limit and job.attempt == 1 and not is_admitted:
            raise QueueFull(f"lane {job.lane.name} holds {lane_queue.depth} jobs, which is its limit")
        self._offer_count += 1
        queue = lane_queue.known_queue(job) or lane_queue.queue_for(job, FILTERS, self._workers, self._worker_groups)
        entry = self._entries[job_id] = lane_queue.add_entry(job, self._offer_count, queue)
        entry.ready_at = now
        if self._sessions is not None:
            pause_ends_at = self._sessions.arrived(entry, queue.route.workers, now)
            if pause_ends_at is not None:
                entry.state, entry.held_by = PAUSED, SESSION_PAUSE
                self._timers.put(entry, pause_ends_at)
                return
        hold_limit = batching_window.hold_limit(entry, queue, self._hold_rules, now)
        if hold_limit is not None:
            self._hold(entry, queue, hold_limit, now)
            return
        if job.deadline is not None:
            self._timers.put(entry, job.deadline)
        if queue.push(entry):
            self._planning_needed = True

    def _queue_of(self, entry: QueuedJob) -> RouteQueue:
        """The queue of a job that has not been sent."""
        lane_queue = self._lane_queue_of[entry.job.lane]
        assert lane_queue is not None
        return lane_queue.queues[entry.queue_key]

    def cancel(self, job_id: str) -> JobLocation:
        """Remove a queued job. A planned one stays counted until it has ended: only its worker can free it."""
        entry = self._entries.get(job_id)
        if entry is None:
            return JobLocation.UNKNOWN
        if entry.state is PLANNED:
            return JobLocation.PLANNED
        self._remove_from_queue(entry)
        return JobLocation.QUEUED

    def observe(self, view: WorkerView, now: float) -> None:
        """Replace the view of a worker."""
        worker = self._workers.get(view.worker)
        if worker is None:
            worker = self._workers[view.worker] = WorkerState(view.worker)
        old = worker.view
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
        """Plan nothing more for the worker. Its jobs in flight stay counted until they have ended."""
        worker_state = self._workers.get(worker)
        if worker_state is None or worker_state.view is None:
            return
        self._revoke_nominations(worker_state)
        worker_state.update_view(None, self._tick_context)
        self._picker.forget(worker_state)
        self._pass_durations.forget(worker)
        if self._sessions is not None:
            self._resume(self._sessions.forget(worker), self._tick_context.now)
        if not worker_state.sequences:
            del self._workers[worker]
        self._refresh_routes()

    def use_lanes(self, lanes: Mapping[Lane, LanePolicy], version: int, trial: LaneTrial | None = None) -> None:
        """Apply other policies to jobs that arrive from now on; the next tick releases those held by earlier ones."""
        switch_lanes(self._lane_queues, lanes, version, trial)
        self._preemption.use_lane_rules(self._lane_queues)
        self._borrowing.use_lane_rules(self._lane_queues)
        self._selector.lane_shares.use_lane_rules(self._lane_queues)
        self._refresh_routes()

    def progress(
        self, job_id: str, step: FirstToken | Produced | Ended, now: float, attempt: int | None = None
    ) -> None:
        """The job had its first token, produced output, or ended.

        Late and repeated messages change nothing, nor do those of another attempt where the caller names it.
        """
        entry = self._entries.get(job_id)
        if entry is None or entry.state is not PLANNED or entry.worker is None:
            return
        if attempt is not None and attempt != entry.job.attempt:
            return
        worker = self._workers[entry.worker]
        # By exact type: asking whether something is an instance of a Struct is slow where it is not.
        if type(step) is Produced:
            # The order may have changed, but no capacity came free: the next walk is soon enough.
            service_history.produced(entry, step.tokens)
            if worker.kv_peaks is not None:
                self._changed_workers[worker] = None
            return
        self._planning_needed = True
        self._changed_workers[worker] = None
        if type(step) is FirstToken:
            if entry.prefill_tokens:
                worker.free_prefill(entry)
                if entry.sibling_window is not None:
                    entry.sibling_window.first_token(entry.job, now)
                if step.prompt_tokens is not None:
                    service_history.prefilled(entry, step.prompt_tokens)
        elif type(step) is Ended:
            worker.free(entry)
            if self._sessions is not None and not entry.is_pooled:
                self._sessions.ended(entry.job, step, now)
            if worker.pads or entry.is_pooled:
                self._pass_durations.job_left(worker, now)
            if step.prompt_tokens is not None or step.output_tokens is not None:
                service_history.ended(entry, step)
            if entry.sibling_window is not None:
                entry.sibling_window.ended(entry.job, entry.charged_tokens)
            entry.run.ended()
            del self._entries[job_id]
            if not worker.sequences or worker.refills or (entry.is_pooled and not worker.pooled_sequences):
                self._hold_check_needed = True
                if worker.view is None and not worker.sequences:
                    del self._workers[worker.name]

    def end_run(self, tenant: str, run_id: str) -> None:
        """The run is over: its KV is kept no longer."""
        if self._sessions is not None:
            self._sessions.end_run(tenant, run_id)

    # What it decides.

    def tick(self, now: float) -> Tick:
        """Everything that can be decided now. A second tick at the same instant decides nothing."""
        timer_heap = self._timers.heap
        expired = self._process_timers(now) if timer_heap and timer_heap[0][0] <= now else ()
        if self._sessions is not None:
            self._resume(self._sessions.resume(now), now)
        if self._hold_check_needed:
            self._hold_check_needed = False
            if self._queues_with_holds:
                self._release_needless_holds(now)
        tick_context = self._tick_context
        plans: tuple[BatchPlan, ...] = ()
        evictions: tuple[InferenceJob, ...] = ()
        if self._planning_needed or (tick_context.retry_at is not None and tick_context.retry_at <= now):
            self._planning_needed = False
            tick_context.start(now)
            yielded = self._update_loans() if self._borrowing.is_enabled else ()
            if self._backlog.waiting or self._preemption.nominating_workers:
                plans, evictions = self._plan_ready_jobs(now)
            else:
                self._changed_workers.clear()
            evictions = (*yielded, *evictions) if yielded else evictions
        wake_at = self._timers.next() if self._timers.heap else None
        for at in (tick_context.retry_at, None if self._sessions is None else self._sessions.wake_at):
            if at is not None and (wake_at is None or at < wake_at):
                wake_at = at
        return Tick(plans, evictions, expired, wake_at)

    # Holding and releasing.

    def _hold(self, entry: QueuedJob, queue: RouteQueue, latest_at: float, now: float) -> None:
        until, entry.reason = batching_window.hold_expiry(entry.job, queue.rules, latest_at)
        self._timers.put(entry, until)
        queue.hold(entry)
        self._queues_with_holds[queue] = None
        if batching_window.is_full(queue):
            self._release(queue, ReleaseReason.SIZE, now)

    def _release(
        self, queue: RouteQueue, reason: ReleaseReason, now: float, sibling_window: SiblingWindow | None = None
    ) -> None:
        """Release all jobs held in the queue together, or those of one sibling window."""
        for entry in tuple(queue.held.values()):
            if sibling_window is None or entry.sibling_window is sibling_window:
                self._unhold(entry, queue)
                self._make_ready(entry, queue, reason, now)

    def _unhold(self, entry: QueuedJob, queue: RouteQueue) -> None:
        queue.unhold(entry)
        if not queue.held:
            del self._queues_with_holds[queue]

    def _make_ready(self, entry: QueuedJob, queue: RouteQueue, reason: ReleaseReason, now: float) -> None:
        entry.held_s, entry.ready_at = now - entry.ready_at, now
        entry.reason = reason
        deadline = entry.job.deadline
        if deadline is not None:
            self._timers.put(entry, deadline)
        elif entry.due is not None:
            self._timers.drop(entry)
        if queue.push(entry):
            self._planning_needed = True

    def _resume(self, entries: list[QueuedJob], now: float) -> None:
        """Paused jobs go on."""
        for entry in entries:
            self._make_ready(entry, self._queue_of(entry), ReleaseReason.IMMEDIATE, now)

    def _remove_from_queue(self, entry: QueuedJob) -> None:
        queue = self._queue_of(entry)
        if self._sessions is not None and not entry.is_pooled:
            self._sessions.left(entry, self._tick_context.now)
        if entry.state is HELD or entry.state is PAUSED:
            if entry.state is HELD:
                self._unhold(entry, queue)
            entry.state = REMOVED
        else:
            self._planning_needed = True
            if entry.state is NOMINATED:
                assert entry.worker is not None
                self._changed_workers[self._workers[entry.worker]] = None
                self._preemption.cancel(entry)
                entry.state = REMOVED
            else:
                was_head = queue.head() is entry
                entry.state = REMOVED
                entry.run.job_left()
                queue.remove(entry, was_head)
        self._timers.drop(entry)
        queue.lane_queue.remove_entry(entry)
        entry.run.ended()
        del self._entries[entry.job.job_id]

    def _process_timers(self, now: float) -> tuple[InferenceJob, ...]:
        """End holds and expire jobs that are due, in order of time; return the jobs that expired."""
        expired = []
        self._expired_decisions.clear()
        while (entry := self._timers.pop(now)) is not None:
            if entry.state is PAUSED:
                assert self._sessions is not None
                self._sessions.end_pause(entry, now)
                self._resume([entry], now)
            elif entry.state is not HELD:
                self._expired_decisions[entry.job.job_id] = decision_of(entry, self._lane_queue_of[entry.lane], now)
                self._remove_from_queue(entry)
                expired.append(entry.job)
            elif entry.reason is ReleaseReason.MAX_WAIT:
                queue = self._queue_of(entry)
                self._unhold(entry, queue)
                self._make_ready(entry, queue, ReleaseReason.MAX_WAIT, now)
            else:
                self._release(self._queue_of(entry), entry.reason, now, entry.sibling_window)
        return tuple(expired)

    def _release_needless_holds(self, now: float) -> None:
        """Workers have changed: release jobs that need not be held any more."""
        for queue in tuple(self._queues_with_holds):
            if not batching_window.should_keep_holding(queue):
                self._release(queue, ReleaseReason.IMMEDIATE, now)
            elif batching_window.is_full(queue):
                self._release(queue, ReleaseReason.SIZE, now)

    # Planning.

    def _plan_ready_jobs(self, now: float) -> tuple[tuple[BatchPlan, ...], tuple[InferenceJob, ...]]:
        preemption = self._preemption
        drafts = self._selector.plan_ready_jobs(
            preemption.ready_nominees(self._changed_workers) if preemption.nominating_workers else ()
        )
        evicted = preemption.select_victims(now) if self._backlog.waiting else ()
        plans = []
        for draft in drafts:
            self._plan_count += 1
            plans.append(draft.plan(self._plan_count, now))
            if self._sessions is not None:
                for job in draft.jobs:
                    if not job.route.pooled:
                        self._sessions.sent(job, self._workers[draft.worker])
            if draft.pads or self._workers[draft.worker].pooled_sequences:
                self._pass_durations.record_start(self._workers[draft.worker], len(draft.jobs), now)
        return tuple(plans), tuple([entry.job for entry in evicted]) if evicted else ()

    def _update_loans(self) -> tuple[InferenceJob, ...]:
        """Lend worker groups or take them back; return the jobs that have to leave."""
        is_changed, evicted = self._borrowing.update(self._workers.values(), self._tick_context)
        if is_changed:
            self._selector.retry_blocked()
        return tuple(evicted)

    def _revoke_nominations(self, worker: WorkerState) -> None:
        if worker.nominated:
            self._planning_needed = True
            for entry in self._preemption.revoke_nominations(worker):
                self._queue_of(entry).push(entry)

    # Routes.

    def _refresh_routes(self) -> None:
        """Workers came, went or changed what they serve. Also drops unused routes and queues."""
        self._worker_groups.clear()
        for lane_queue in self._lane_queues:
            # Nominated and paused jobs are in no queue and may come back to theirs.
            if not self._preemption.nominating_workers and not self.session_counts().paused:
                lane_queue.prune()
            lane_queue.forget_routes()
            for route in lane_queue.routes.values():
                route.refresh(self._workers.values(), self._worker_groups)
        self._selector.reset_blocked()
        self._planning_needed = self._hold_check_needed = True
