"""The loop that owns the scheduler.

Everything here runs on one event loop, and nothing else calls the scheduler's inputs. Inputs (a job, a cancel, an item,
a new view) change the scheduler's state and request a tick; the tick runs once the current burst of callbacks is over,
so that jobs which arrive together are planned together. Between inputs the loop sleeps until `wake_at`.

Every admitted job ends exactly once: by its worker, by its own cancel, by its deadline, or by the runner when the
worker violates the stream protocol. A lost or preempted attempt does not end its job while another attempt may continue
it (`domain.recovery`): the job is offered again under the same stream, and later items of the lost worker are dropped.

What happens to a job between its admission and its end is in `lifecycle`, which publishes the job events.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial

from inferry.dispatch.budget import BUDGET_HOLD_S, watermark_timeout
from inferry.dispatch.cancel_sender import CancelSender, PendingCancel
from inferry.dispatch.fleet_monitor import FleetMonitor
from inferry.dispatch.hedging import may_hedge
from inferry.dispatch.lifecycle import JobLifecycle
from inferry.dispatch.outage_timeout import OutageTimeout
from inferry.dispatch.plan_runner import run_plan
from inferry.dispatch.pool import Pool
from inferry.dispatch.prefill_router import PrefillRouter
from inferry.dispatch.queue_admission import QueueAdmission
from inferry.dispatch.task_set import TaskSet
from inferry.dispatch.usage_validator import UsageValidator
from inferry.domain.attempts import UNLIMITED, Attempt
from inferry.domain.clock import Clock
from inferry.domain.decisions import Decision
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InternalError,
    NoWorker,
    Preempted,
    QueueTimeout,
    WorkerLost,
    WorkerTimeout,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import BatchPlan, JobLocation
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.routes import RouteKey
from inferry.domain.streams import Failed
from inferry.observe.counters import TickStatistics
from inferry.scheduling.lane_switch import LaneTrial
from inferry.scheduling.scheduler import Scheduler
from inferry.streams.mailbox import JobStream


class DispatchLoop:
    """Offers jobs, ticks, runs plans, routes items, settles ends."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: Pool,
        clock: Clock,
        lifecycle: JobLifecycle,
        queue_admission: QueueAdmission,
        depth: QueueDepth,
        fleet: FleetMonitor,
        usage_validator: UsageValidator,
        cancel_sender: CancelSender,
        tasks: TaskSet,
        ticks: TickStatistics,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._now = clock.now
        self._lifecycle = lifecycle
        self._demux = lifecycle.demux
        self.streams = self._demux.streams
        self._queue_admission = queue_admission
        self.overflow_batch = queue_admission.overflow_batch
        self.queue_depths, self.queue_depth_of = depth.by_lane, depth.of
        self._fleet = fleet
        self.used_fraction = fleet.used_fraction
        self._usage_validator = usage_validator
        self._prefill_router = PrefillRouter(scheduler)
        self._cancel_sender = cancel_sender
        self._tasks = tasks
        self._ticks = ticks
        self._loop = asyncio.get_running_loop()
        self._tick_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._evicted: set[str] = set()
        self._delayed: dict[str, asyncio.TimerHandle] = {}
        self._outage_timeout = OutageTimeout(
            pool.outage_timeout_s, self._now, pool.is_model_out, depth.waiting, self.cancel
        )
        self._idle = asyncio.Event()
        self._idle.set()
        lifecycle.request_tick = self._request_tick
        lifecycle.on_retry = self._offer_later
        lifecycle.on_idle = self._idle.set
        pool.on_view = self._view_changed
        pool.on_removed = self._worker_removed
        pool.in_flight = lambda worker: scheduler.use(worker).sequences
        fleet.on_change = self._request_tick
        fleet.on_overdue = self._hedge
        fleet.has_jobs = lambda: len(self._demux) > 0

    @property
    def open_streams(self) -> int:
        return len(self._demux)

    @property
    def prefills(self) -> Mapping[tuple[str, ...], float]:
        """Prefills by worker and result."""
        return self._lifecycle.prefills

    @property
    def merged_deltas(self) -> int:
        """Deltas merged into another because their reader was slow."""
        return self._demux.merge_counter.deltas

    # -- inputs ------------------------------------------------------------------------------------------------------

    def may_overflow(self, job: InferenceJob) -> bool:
        """Whether a hosted worker could serve the job where own workers cannot."""
        return self._queue_admission.may_overflow(job)

    def submit(
        self,
        job: InferenceJob,
        granted_tokens: int = UNLIMITED,
        batch: int = 0,
        no_worker: GatewayError | None = None,
    ) -> JobStream:
        """Open the job's stream, then offer the job: every queued job has a reader.

        `granted_tokens` is how many tokens its budgets grant it for now. A job that waits for a batch of watermarks,
        its own `batch` or that of its overflow, is held until `reoffer`, and fails after BUDGET_HOLD_S. Raises
        QueueFull, DeadlineInfeasible, or `no_worker` where own workers cannot take the job and it does not overflow.
        """
        now = self._now()
        job, prediction = self._queue_admission.admit(job, now, no_worker)
        if self._prefill_router.is_enabled:
            job = self._prefill_router.redirect(job)
        stream = self._lifecycle.open(job, granted_tokens, prediction)
        try:
            if batch or (job.overflow is not None and self.overflow_batch(job)):
                error = watermark_timeout()
                self._delayed[job.job_id] = self._loop.call_later(BUDGET_HOLD_S, self.cancel, job.job_id, error)
            else:
                self._scheduler.offer(job, now, is_admitted=job.overflow is not None)
        except Exception as error:
            self._lifecycle.settle_overflow(stream.attempt)
            refusal = error if isinstance(error, GatewayError) else InternalError("the job could not be queued")
            self._demux.close(stream, Failed(job.job_id, refusal))
            raise
        self._lifecycle.queued(stream.attempt, now)
        self._idle.clear()
        self._fleet.resume()
        self._request_tick()
        return stream

    def use_lanes(self, lanes: Mapping[Lane, LanePolicy], version: int, trial: LaneTrial | None) -> None:
        """Apply other lane policies to jobs that arrive from now on."""
        self._scheduler.use_lanes(lanes, version, trial)
        self._lifecycle.use_lanes(lanes, version, trial)
        self._fleet.use_lanes()
        self._request_tick()

    def check_space(self, job: InferenceJob, count: int) -> None:
        """Raise the refusal of `count` jobs like this one that cannot be queued together."""
        self._queue_admission.check_space(job, count, self._now())

    def cancel(self, job_id: str, error: GatewayError | None = None) -> PendingCancel | None:
        """End a job for a reason of its own. A queued job ends at once, a running one when its worker confirms.

        Returns the cancel that its worker is to confirm; None where no worker has the job.
        """
        stream = self._demux.get(job_id)
        if stream is None:
            return None
        reason = error or ClientClosed("the client closed the connection")
        if job_id in self._delayed:
            self._delayed.pop(job_id).cancel()
            self._lifecycle.end(stream, Failed(job_id, reason), self._now())
            return None
        if job_id in self._evicted or self._take_queued(stream.attempt):
            self._evicted.discard(job_id)
            self._lifecycle.end(stream, Failed(job_id, reason), self._now())
            self._request_tick()
            return None
        return self._lifecycle.stop(stream.attempt, reason)

    def evict_queued(self, job_ids: Iterable[str]) -> set[str]:
        """Take queued jobs out of the queue and return them: none of them will run. Each waits for its `cancel`."""
        attempts = [stream.attempt for job_id in job_ids if (stream := self._demux.get(job_id)) is not None]
        found = {attempt.job.job_id for attempt in attempts if self._take_queued(attempt)}
        self._evicted |= found
        self._request_tick()
        return found

    def _take_queued(self, attempt: Attempt) -> bool:
        """Take the job out of the queue, with the record of its wait; say whether it was there."""
        job_id = attempt.job.job_id
        if attempt.plan is None:
            attempt.decision = self._scheduler.decision(job_id, self._now())
        return self._scheduler.cancel(job_id) is JobLocation.QUEUED

    def is_evicted(self, job_id: str) -> bool:
        """Whether the job was taken out of the queue and waits for its `cancel`."""
        return job_id in self._evicted

    def reoffer(self, job_id: str) -> None:
        """Offer a job that was held or rests before a retry. It was admitted before, so no queue limit applies."""
        if (timer := self._delayed.pop(job_id, None)) is not None:
            timer.cancel()
        stream = self._demux.get(job_id)
        if stream is None:
            return
        job = stream.attempt.job
        if job.route.adapter is not None and not self._scheduler.has_route(job.route):
            error = NoWorker(f"the adapter `{job.route.model}` was unloaded")
            self._lifecycle.end(stream, Failed(job_id, error), self._now())
            return
        if self._prefill_router.is_stranded(job):
            self._give_up_prefill(stream)
            return
        self._scheduler.offer(job, self._now(), is_admitted=True)
        self._request_tick()

    def _offer_later(self, job_id: str, delay_s: float) -> None:
        if delay_s > 0:
            self._delayed[job_id] = self._loop.call_later(delay_s, self.reoffer, job_id)
        else:
            self.reoffer(job_id)

    def end_run(self, tenant: str, run_id: str) -> None:
        """The run is over: no worker keeps KV for it, which may let paused runs go on."""
        self._scheduler.end_run(tenant, run_id)
        self._request_tick()

    def has_route(self, route: RouteKey) -> bool:
        """Whether some worker, up or down, could take jobs of the route."""
        return self._scheduler.has_route(route)

    def attempt_of(self, job_id: str) -> Attempt | None:
        """The current attempt of a job in flight."""
        stream = self._demux.get(job_id)
        return None if stream is None else stream.attempt

    def decision_of(self, attempt: Attempt) -> Decision | None:
        """The record of an attempt: why it waits, where it has not been sent."""
        return attempt.decision or self._scheduler.decision(attempt.job.job_id, self._now())

    def cancel_all(self, error: GatewayError) -> None:
        for job_id in self._demux.job_ids():
            self.cancel(job_id, error)

    def end_all(self, error: GatewayError) -> None:
        """End all jobs without waiting for workers to confirm."""
        for stream in self._demux.streams():
            if not stream.attempt.is_ended:
                self._lifecycle.end(stream, Failed(stream.attempt.job.job_id, error), self._now())

    async def wait_idle(self) -> None:
        """Return once every admitted job has ended."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop ticking. Jobs that have not ended yet end with an error."""
        for timer in (self._timer, *self._delayed.values()):
            if timer is not None:
                timer.cancel()
        self._fleet.close()
        self._outage_timeout.close()
        self.end_all(InternalError("the gateway stopped"))
        await self._tasks.close()

    # -- workers -----------------------------------------------------------------------------------------------------

    def _view_changed(self, worker: str) -> None:
        view = self._pool.view(worker)
        self._prefill_router.view_changed(view)
        self._fleet.view_changed(worker)
        if view.role == "prefill":
            self._release_stranded()
        self._outage_timeout.worker_changed(view)

    def _worker_removed(self, worker: str) -> None:
        self._fleet.forget(worker)
        self._usage_validator.forget(worker)
        self.end_unroutable("was removed")

    def end_unroutable(self, reason: str) -> None:
        """End queued jobs that no worker can take any more."""
        self._release_stranded()
        for stream in self._demux.streams():
            job = stream.attempt.job
            if stream.attempt.plan is None and not self._scheduler.has_route(job.route):
                self.cancel(job.job_id, NoWorker(f"the last worker of model `{job.route.model}` {reason}"))

    def _release_stranded(self) -> None:
        """Have jobs that wait for a prefill worker computed whole where none is up."""
        if self._prefill_router.is_enabled:
            for stream in self._demux.streams():
                attempt = stream.attempt
                is_queued = attempt.plan is None and attempt.job.job_id not in self._evicted
                if is_queued and self._prefill_router.is_stranded(attempt.job) and self._take_queued(attempt):
                    self._give_up_prefill(stream)

    def _give_up_prefill(self, stream: JobStream) -> None:
        error = NoWorker("no prefill worker is up")
        self._lifecycle.attempt_ended(stream, Failed(stream.attempt.job.job_id, error), self._now())
        self._request_tick()

    def _hedge(self, attempt: Attempt, now: float) -> None:
        """Retry an overdue call on another worker, if allowed. Its worker gets no new work until it has confirmed the
        cancel; whether it is down is for its supervisor to find out.
        """
        job, plan, stream = attempt.job, attempt.plan, self._demux.get(attempt.job.job_id)
        route = job.route
        if plan is None or stream is None or stream.attempt is not attempt or not may_hedge(attempt):
            return
        worker = plan.worker
        is_served = self._pool.serves_elsewhere(route.model, (*route.avoid, worker), route.precision)
        if is_served and self._fleet.take_hedge_token():
            self._lifecycle.attempt_ended(
                stream, Failed(job.job_id, WorkerTimeout(f"the first token from {worker} is overdue")), now
            )
            self._pool.suspect(worker, self._cancel_sender.send(worker, job.job_id).confirmed)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _request_tick(self) -> None:
        if not self._tick_due:
            self._tick_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        now = self._now()
        tick = self._scheduler.tick(now)
        decided_at, jobs = self._now(), 0
        for plan in tick.plans:
            jobs += len(plan.jobs)
            self._send(plan, now)
        self._ticks.record(decided_at - now, jobs)
        for job in tick.evictions:
            stream = self._demux.get(job.job_id)
            if stream is not None and not self._lifecycle.is_stopping(job.job_id):
                self._lifecycle.stop(
                    stream.attempt, Preempted(f"stopped for a job of a higher lane than {job.lane.name}")
                )
        for job in tick.expired:
            stream = self._demux.get(job.job_id)
            if stream is not None:
                stream.attempt.decision = self._scheduler.decision(job.job_id, now)
                waited = (now - job.arrived_at) * 1000
                error = QueueTimeout(f"the deadline passed after {waited:.0f} ms in the queue of lane {job.lane.name}")
                self._lifecycle.end(stream, Failed(job.job_id, error), now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if tick.wake_at is not None:
            self._timer = self._loop.call_later(max(0.0, tick.wake_at - self._now()), self._tick)

    # -- acting ------------------------------------------------------------------------------------------------------

    def _send(self, plan: BatchPlan, now: float) -> None:
        self._lifecycle.sent(plan, now)
        self._tasks.spawn(self._run(plan))
        self._cancel_sender.plan_sent(plan.worker)

    async def _run(self, plan: BatchPlan) -> None:
        """Run one plan to the end of every job in it, whatever the worker does."""
        has_returned = False
        plan_error: GatewayError | None = None
        try:
            plan_error = await run_plan(self._pool.worker(plan.worker), plan, partial(self._lifecycle.emit, plan))
            has_returned = True
        finally:
            now, is_unfinished = self._now(), False
            for job in plan.jobs:
                stream = self._demux.get(job.job_id)
                is_unfinished = is_unfinished or stream is not None
                if stream is not None and stream.attempt.plan is plan:
                    if plan_error is None and has_returned:
                        plan_error = WorkerLost(f"worker {plan.worker} returned before the end of the job")
                    elif plan_error is None:
                        plan_error = InternalError("the gateway stopped")
                    self._lifecycle.attempt_ended(stream, Failed(job.job_id, plan_error), now)
            if is_unfinished:  # else the ends of all jobs have asked for a tick
                self._request_tick()
