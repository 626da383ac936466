"""The loop that owns the scheduler.

Everything here runs on one event loop; nothing else may touch the scheduler. Inputs (a job, a cancel, an item, a new
view) change the scheduler's state and ask for a tick; the tick runs once the current burst of callbacks is over, so
that jobs which arrive together are planned together. Between inputs the loop sleeps exactly until `wake_at`.

Every job that gets in ends exactly once: by its worker, by its own cancel, by its deadline, or by the runner when the
worker breaks its word. An attempt that was lost or stopped is not the end of its job while another may go on with it
(`domain.recovery`): the job is offered again, under the same stream, and what the lost worker may still say is dropped.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial

from inferry.admission.queue_limiter import QueueLimiter
from inferry.dispatch.budget import BUDGET_HOLD_S, Budget, budget_stop, is_budget_capped
from inferry.dispatch.cancel_sender import CancelSender
from inferry.dispatch.capacity import CAPACITY_INTERVAL_S, CapacityTracker
from inferry.dispatch.hedging import HedgePolicy, may_hedge
from inferry.dispatch.outage_timeout import OutageTimeout
from inferry.dispatch.plan_runner import run_plan
from inferry.dispatch.pool import Pool
from inferry.dispatch.queue_admission import predict_wait, renew_at_tokens
from inferry.dispatch.usage_validator import UsageValidator
from inferry.domain.attempts import UNLIMITED, Attempt
from inferry.domain.clock import Clock
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InternalError,
    NoWorker,
    Preempted,
    QueueTimeout,
    WorkerTimeout,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import BatchPlan, Ended, FirstToken, JobLocation, Produced
from inferry.domain.recovery import Retry, next_attempt, total_usage
from inferry.domain.routes import RouteKey
from inferry.domain.streams import Delta, Done, End, Failed, Item
from inferry.domain.values import replace
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.prediction.wait_model import WaitModel, deadline_refusal
from inferry.prediction.wait_prediction import WaitPrediction
from inferry.scheduling.scheduler import Scheduler
from inferry.streams.demux import Demux
from inferry.streams.mailbox import JobStream

log = logging.getLogger(__name__)

RETRY_DELAY_S = 0.1
"""How long a lost job rests before it is offered again where only a worker that lost it can take it; four times as long
after the next loss, and again after the one after that."""

_FIRST_TOKEN = FirstToken()
PROGRESS_INTERVAL_TOKENS = 32
"""Output is charged to its run in pieces of so many tokens, and the rest of it at the end."""


class DispatchLoop:
    """Offers jobs, ticks, runs plans, routes items, settles ends."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        lanes: Mapping[Lane, LanePolicy],
        pool: Pool,
        recorder: Recorder,
        metrics: Metrics,
        clock: Clock,
        on_done: Callable[[InferenceJob, Done], None] | None = None,
        budget: Budget | None = None,
        on_cached: Callable[[str, int, int], None] | None = None,
        queue_limiter: QueueLimiter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self.queue_limiter = queue_limiter or QueueLimiter(lanes)
        self._pool = pool
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._now = clock.now
        self._on_done = on_done
        self._budget = budget
        self._slo_targets = {
            lane: (policy.ttft_ms / 1000, (policy.itl_ms or 0) / 1000)
            for lane, policy in lanes.items()
            if policy.ttft_ms is not None
        }
        self._capacity = CapacityTracker(lanes, on_cached)
        self._hedging = HedgePolicy(pool.policy.max_hedged_retry_ratio)
        self.waits = WaitModel()
        self._demux = Demux()
        self.streams = self._demux.streams
        self._loop = asyncio.get_running_loop()
        self._tick_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._refresh_timer: asyncio.TimerHandle | None = None
        self._logged_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.cancel_sender = CancelSender(pool.worker, self._spawn)
        self._cancel_reasons: dict[str, GatewayError] = {}
        self._budget_stopped: set[str] = set()
        self._evicted: set[str] = set()
        self._usage_validator = UsageValidator(metrics)
        self._delayed: dict[str, asyncio.TimerHandle] = {}
        self._outage_timeout = OutageTimeout(
            pool.policy.no_worker_timeout_s, self._now, pool.is_model_out, self._queued_jobs, self.cancel
        )
        self._idle = asyncio.Event()
        self._idle.set()
        pool.on_view = self._observe
        pool.on_removed = self._forget
        pool.in_flight = lambda worker: scheduler.use(worker).sequences
        metrics.watch(
            queue_depths=scheduler.depths,
            views=pool.views,
            open_streams=lambda: len(self._demux),
            merged_deltas=lambda: self._demux.merge_counter.deltas,
            ledger_written=lambda: recorder.written,
            ledger_dropped=lambda: recorder.dropped,
            wait_coverage=self.waits.coverages,
        )

    # -- inputs ------------------------------------------------------------------------------------------------------

    def submit(
        self, job: InferenceJob, granted_tokens: int = UNLIMITED, hold_error: GatewayError | None = None
    ) -> JobStream:
        """Open the job's stream, then offer it: nobody waits for a job that nobody owns.

        `granted_tokens` is how many tokens its budgets grant it for now. A job that is held is offered with `reoffer`,
        or fails after BUDGET_HOLD_S with the error `hold_error`.
        Raises QueueFull, or DeadlineInfeasible where the deadline would pass in the queue: before it has waited.
        """
        now = self._now()
        prediction = predict_wait(self._scheduler, self.waits, job, job.tenant, now)
        if job.deadline is not None and (too_late := deadline_refusal(self.waits, job, prediction, now)) is not None:
            raise too_late
        if not self.queue_limiter.has_space(job):
            renew_at_tokens(
                self.queue_limiter, self.waits, job, predict_wait(self._scheduler, self.waits, job, None, now), now
            )
        attempt = Attempt(job)
        attempt.grant(granted_tokens)
        attempt.predicted = prediction
        stream = self._demux.open(attempt)
        try:
            if hold_error is None:
                self._scheduler.offer(job, now)
            else:
                self._delayed[job.job_id] = self._loop.call_later(BUDGET_HOLD_S, self.cancel, job.job_id, hold_error)
        except Exception as error:
            refusal = error if isinstance(error, GatewayError) else InternalError("the job could not be queued")
            self._demux.close(stream, Failed(job.job_id, refusal))
            raise
        self.queue_limiter.joined(job)
        self.waits.queued(prediction, now)
        self._capacity.queued(attempt)
        self._metrics.offered(job)
        self._idle.clear()
        if self._refresh_timer is None:
            self._refresh_capacity()
        self._request_tick()
        return stream

    def cancel(self, job_id: str, error: GatewayError | None = None) -> None:
        """End a job for a reason of its own. Queued, it is gone at once; running, when its worker confirms."""
        stream = self._demux.get(job_id)
        if stream is None:
            return
        reason = error or ClientClosed("the client closed the connection")
        if job_id in self._delayed:
            self._delayed.pop(job_id).cancel()
            self._end(stream, Failed(job_id, reason), self._now())
            return
        if job_id in self._evicted or self._scheduler.cancel(job_id) is JobLocation.QUEUED:
            self._evicted.discard(job_id)
            self._end(stream, Failed(job_id, reason), self._now())
            self._request_tick()
            return
        self._stop(stream.attempt, reason)

    def evict_queued(self, job_ids: Iterable[str]) -> set[str]:
        """Take jobs out that are queued, and say which: none of them runs any more. Until each is cancelled, which is
        to be soon, its client waits.
        """
        found = {job_id for job_id in job_ids if self._scheduler.cancel(job_id) is JobLocation.QUEUED}
        self._evicted |= found
        self._request_tick()
        return found

    def _stop(self, attempt: Attempt, reason: GatewayError) -> None:
        """Have a running attempt ended by its worker, for this reason."""
        plan, job_id = attempt.plan, attempt.job.job_id
        if plan is not None:
            self._cancel_reasons[job_id] = reason
            self.cancel_sender.send(plan.worker, job_id)

    def has_route(self, route: RouteKey) -> bool:
        """Whether some worker, up or down, could take jobs of the route."""
        return self._scheduler.has_route(route)

    def attempt_of(self, job_id: str) -> Attempt | None:
        """The attempt that a job in flight is at."""
        stream = self._demux.get(job_id)
        return None if stream is None else stream.attempt

    def cancel_all(self, error: GatewayError) -> None:
        for job_id in self._demux.job_ids():
            self.cancel(job_id, error)

    def end_all(self, error: GatewayError) -> None:
        """End what is left, without waiting for workers to confirm."""
        for stream in self._demux.streams():
            if not stream.attempt.is_ended:
                self._end(stream, Failed(stream.attempt.job.job_id, error), self._now())

    async def wait_idle(self) -> None:
        """Until every job that got in has ended."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop ticking. Jobs that have not ended by now end with an error."""
        for timer in (self._timer, self._refresh_timer, *self._delayed.values()):
            if timer is not None:
                timer.cancel()
        self._outage_timeout.close()
        self.end_all(InternalError("the gateway stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _observe(self, worker: str) -> None:
        view = self._pool.view(worker)
        self._metrics.register_models(view.models)
        self._metrics.register_worker(worker)
        now = self._now()
        self._scheduler.observe(self._capacity.update_view(view, now), now)
        self._outage_timeout.models_changed(view.models)
        self._request_tick()

    def _queued_jobs(self, model: str) -> list[InferenceJob]:
        """The jobs of a model that are at no worker."""
        attempts = [stream.attempt for stream in self._demux.streams()]
        return [one.job for one in attempts if one.plan is None and one.job.route.model == model]

    def _forget(self, worker: str) -> None:
        """The worker is gone for good."""
        self._scheduler.forget(worker)
        self._capacity.forget(worker)
        self._hedging.forget(worker)
        self._metrics.remove_worker(worker)
        self._usage_validator.forget(worker)
        for stream in self._demux.streams():
            job = stream.attempt.job
            if stream.attempt.plan is None and not self._scheduler.has_route(job.route):
                self.cancel(job.job_id, NoWorker(f"the last worker of model `{job.route.model}` was removed"))

    def _refresh_capacity(self) -> None:
        """Compute the workers' rooms anew. Nobody looks while nothing is in flight: then nothing changes them but time,
        and the first job that comes looks at once.
        """
        self._refresh_timer = None
        now = self._now()
        if log.isEnabledFor(logging.DEBUG) and now >= self._logged_at + 1.0:
            self._logged_at = now
            for line in self._capacity.describe():
                log.debug(line)
        for view in self._capacity.refresh(now):
            self._scheduler.observe(view, now)
            self._request_tick()
        for attempt in self._hedging.due(self._pool.last_activity_at, now):
            self._hedge(attempt, now)
        if len(self._demux):
            self._refresh_timer = self._loop.call_later(CAPACITY_INTERVAL_S, self._refresh_capacity)

    def _hedge(self, attempt: Attempt, now: float) -> None:
        """Retry a call elsewhere whose worker seems frozen, if that may be. The worker gets no more until it has
        confirmed that it let go of the call; whether it is down is for its own watch to say.
        """
        job, plan, stream = attempt.job, attempt.plan, self._demux.get(attempt.job.job_id)
        if plan is None or stream is None or stream.attempt is not attempt or not may_hedge(attempt):
            return
        worker = plan.worker
        if self._pool.serves_elsewhere(job.route.model, (*job.route.avoid, worker)) and self._hedging.take_token():
            self._attempt_ended(
                stream, Failed(job.job_id, WorkerTimeout(f"the first token from {worker} is overdue")), now
            )
            self._pool.suspect(worker, self.cancel_sender.send(worker, job.job_id))

    def _request_tick(self) -> None:
        if not self._tick_due:
            self._tick_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        now = self._now()
        tick = self._scheduler.tick(now)
        for plan in tick.plans:
            self._metrics.planned(plan, now)
            for job in plan.jobs:
                stream = self._demux.get(job.job_id)
                assert stream is not None, "a planned job has a stream"
                stream.attempt.sent(plan, now)
                self.queue_limiter.left(job)
                self._capacity.sent(stream.attempt, now)
                self._hedging.sent(plan.worker, stream.attempt)
                prediction = stream.attempt.predicted
                if isinstance(prediction, WaitPrediction):
                    self.waits.sent(prediction, now)
            self._spawn(self._run(plan))
        for job in tick.evictions:
            stream = self._demux.get(job.job_id)
            if stream is not None and job.job_id not in self._cancel_reasons:
                self._stop(stream.attempt, Preempted(f"stopped for a job of a higher lane than {job.lane.name}"))
        for job in tick.expired:
            stream = self._demux.get(job.job_id)
            if stream is not None:
                waited = (now - job.arrived_at) * 1000
                error = QueueTimeout(f"the deadline passed after {waited:.0f} ms in the queue of lane {job.lane.name}")
                self._end(stream, Failed(job.job_id, error), now)
        self._sleep_until(tick.wake_at)

    def _sleep_until(self, wake_at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            self._timer = self._loop.call_later(max(0.0, wake_at - self._now()), self._tick)

    # -- acting ------------------------------------------------------------------------------------------------------

    async def _run(self, plan: BatchPlan) -> None:
        """Run one plan to the end of every job in it, whatever the worker does."""
        plan_error: GatewayError = InternalError("the gateway stopped")
        try:
            plan_error = await run_plan(self._pool.worker(plan.worker), plan, partial(self._emit, plan))
        finally:
            now = self._now()
            for job in plan.jobs:
                stream = self._demux.get(job.job_id)
                if stream is not None and stream.attempt.plan is plan:
                    self._attempt_ended(stream, Failed(job.job_id, plan_error), now)
            self._request_tick()

    def _emit(self, plan: BatchPlan, item: Item) -> None:
        """Where workers put items. Called once per event, so it does no more than it must."""
        stream = self._demux.get(item.job_id)
        if stream is None:
            return  # late: the job has ended
        attempt = stream.attempt
        if attempt.plan is not plan:
            return  # late: somebody else goes on with it
        now = self._now()
        if type(item) is not Delta:
            self._attempt_ended(stream, item, now)  # type: ignore[arg-type]
            self._request_tick()
            return
        if item.tokens:
            job = attempt.job
            last = attempt.last_token_at
            if last is None:
                attempt.first_token(now)
                self._capacity.first_token(attempt, now)
                self._hedging.first_token(plan.worker, attempt, now)
                if job.resume_point is None:
                    self._metrics.first_token(attempt)
                self._scheduler.progress(job.job_id, _FIRST_TOKEN, now)
                self._request_tick()
            else:
                self._metrics.inter_token_latency(job.lane, now - last)
                attempt.last_token_at = now
            slo_target = self._slo_targets.get(job.lane)
            if (
                slo_target is not None
                and now - attempt.slo_start_at > slo_target[0] + attempt.output_tokens * slo_target[1]
            ):
                attempt.slo_attained = False
            attempt.output_tokens += item.tokens
            if attempt.output_tokens >= attempt.renew_at_tokens and not self._may_continue(attempt, item):
                return
            if attempt.output_tokens >= attempt.reported_tokens + PROGRESS_INTERVAL_TOKENS:
                self._scheduler.progress(job.job_id, Produced(attempt.output_tokens - attempt.reported_tokens), now)
                attempt.reported_tokens = attempt.output_tokens
        stream.push(item)

    def _may_continue(self, attempt: Attempt, item: Delta) -> bool:
        """Whether the piece may be delivered. A job whose budget is used up is stopped, and ends well."""
        job, budget = attempt.job, self._budget
        assert budget is not None, "who grants so much may be asked for more"
        if job.job_id not in self._budget_stopped:
            before = 0 if job.resume_point is None else len(job.resume_point.output_ids)
            attempt.grant(budget.renew_grant(job.job_id, before + attempt.output_tokens))
            if attempt.output_tokens < max(attempt.granted_tokens, attempt.renew_at_tokens):
                return True
            self._budget_stopped.add(job.job_id)
            self._stop(attempt, budget.exhausted_error(job.job_id))
            attempt.renew_at_tokens = 0  # whatever still comes is too much
            if attempt.output_tokens == attempt.granted_tokens:
                return True
        attempt.output_tokens -= item.tokens
        return False

    def _attempt_ended(self, stream: JobStream, end: End, now: float) -> None:
        """A worker is done with a job. The job is over too, unless it is to go on elsewhere."""
        end = self._usage_validator.corrected(stream.attempt, end)
        if self._cancel_reasons:
            reason = self._cancel_reasons.pop(end.job_id, None)
            if end.job_id in self._budget_stopped:
                end = budget_stop(stream.attempt, end, reason)
            elif reason is not None and isinstance(end, Failed):
                end = replace(end, error=reason)
        if isinstance(end, Failed) and end.error.can_failover and self._may_retry(end.error):
            retry = next_attempt(stream.attempt, end)
            if isinstance(retry, Retry):
                self._retry(stream, end, retry, now)
                return
            end = retry or end
        self._end(stream, end, now)

    def _may_retry(self, error: GatewayError) -> bool:
        return (error.retry_after_s or 0.0) <= self._pool.policy.no_worker_timeout_s

    def _retry(self, stream: JobStream, end: Failed, retry: Retry, now: float) -> None:
        """Account for the attempt that is over and offer the job again."""
        lost = stream.attempt
        if self._budget is not None and (unwelcome := self._budget.retry_refusal(retry.job)) is not None:
            self._end(stream, replace(end, error=unwelcome), now)
            return
        lost.ended(end, now)
        self._settle(lost, end, now, resumed=not retry.from_start)
        attempt = Attempt(retry.job)
        # What was granted stands; what was lost with a worker is not charged.
        attempt.grant(lost.granted)
        attempt.slo_attained = lost.slo_attained
        slo_target = self._slo_targets.get(retry.job.lane)
        if retry.job.resume_point is not None and slo_target is not None:
            attempt.slo_start_at += len(retry.job.resume_point.output_ids) * slo_target[1]
        stream.begin_attempt(attempt, from_start=retry.from_start)
        self.queue_limiter.joined(retry.job)
        self._capacity.queued(attempt)
        self._metrics.offered(retry.job)
        job_id = retry.job.job_id
        losses = retry.job.attempt - 1 - retry.job.preemptions
        if not losses or self._pool.serves_elsewhere(retry.job.route.model, retry.job.route.avoid):
            self.reoffer(job_id)
        else:
            delay_s = max(RETRY_DELAY_S * 4 ** min(losses - 1, 2), end.error.retry_after_s or 0.0)
            self._delayed[job_id] = self._loop.call_later(delay_s, self.reoffer, job_id)

    def reoffer(self, job_id: str) -> None:
        if (timer := self._delayed.pop(job_id, None)) is not None:
            timer.cancel()
        stream = self._demux.get(job_id)
        if stream is not None:
            self._scheduler.offer(stream.attempt.job, self._now())
            self._request_tick()

    def _end(self, stream: JobStream, end: End, now: float) -> None:
        """The one place where a job ends."""
        attempt = stream.attempt
        job = attempt.job
        self._cancel_reasons.pop(job.job_id, None)
        self._budget_stopped.discard(job.job_id)
        self._evicted.discard(job.job_id)
        if self._budget is not None and is_budget_capped(job, end):
            end = replace(end, stopped=self._budget.exhausted_error(job.job_id), stopped_by_engine=True)
        attempt.ended(end, now)
        usage = total_usage(job, attempt.usage())
        cost = None if self._budget is None else self._budget.ended(attempt, usage, now)
        self._settle(attempt, end, now, cost=cost)
        if job.resume_point is not None and isinstance(end, Done):
            end = replace(end, usage=usage, raw=b"")
        self._demux.close(stream, end)
        if isinstance(end, Done) and self._on_done is not None and attempt.is_representative and end.stopped is None:
            self._on_done(job, end)
        if not len(self._demux):
            self._idle.set()

    def _settle(
        self, attempt: Attempt, end: End, now: float, *, resumed: bool | None = None, cost: int | None = None
    ) -> None:
        """Give back what an attempt held, and account for it. `resumed` says how its job goes on, if it does; then the
        attempt costs its tenant nothing, and the last one pays for what was delivered.
        """
        job = attempt.job
        if attempt.sent_at is None:
            self.queue_limiter.left(job)
            if isinstance(attempt.predicted, WaitPrediction):
                self.waits.left(attempt.predicted, now)
        self._capacity.ended(attempt, now)
        usage = end.usage
        self._scheduler.progress(
            job.job_id,
            Ended(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
            if isinstance(end, Done)
            else Ended(output_tokens=max(usage.output_tokens, attempt.output_tokens)),
            now,
        )
        entry = attempt.entry(self._clock.wall(), cost)
        self._metrics.ended(attempt, has_slo=job.lane in self._slo_targets, entry=entry, resumed=resumed)
        self._recorder.record(entry)
        if attempt.plan is not None:
            if attempt.first_token_at is None:
                self._hedging.ended(attempt.plan.worker, attempt)
            if isinstance(end, Done):
                self._pool.served(attempt.plan.worker)
            else:
                self._pool.lost(attempt.plan.worker, job.job_id, end.error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
