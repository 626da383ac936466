"""The life of a job after admission: its stream, its attempts, its one end.

Belongs to the dispatch loop. Items of workers come in through `emit`; each attempt ends through `attempt_ended`, each
job through `end`, exactly once. The job events (`domain.job_events`) are published here and only here.
"""

from collections.abc import Callable, Mapping
from typing import Final

from inferry.dispatch.budget import Budget, budget_stop, is_budget_capped
from inferry.dispatch.cancel_sender import CancelSender, PendingCancel
from inferry.dispatch.gpu_accounting import GpuAccounting
from inferry.dispatch.overflow import OverflowRouter
from inferry.dispatch.pool import Pool
from inferry.dispatch.usage_validator import UsageValidator
from inferry.domain.attempts import Attempt
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError, Prefilled
from inferry.domain.job_events import JobEvents
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import PROGRESS_INTERVAL_TOKENS, BatchPlan, Ended, FirstToken, PredictedWait, Produced
from inferry.domain.prefill import billed_end, engine_usage
from inferry.domain.recovery import Retry, next_attempt, total_usage
from inferry.domain.streams import Delta, Done, End, Failed, Item, Placed, Restarted
from inferry.domain.values import replace
from inferry.scheduling.lane_switch import LaneTrial
from inferry.scheduling.scheduler import Scheduler
from inferry.streams.demux import Demux
from inferry.streams.mailbox import JobStream

RETRY_DELAY_S = 0.1
"""Pause before a lost job is offered again where only a worker that lost it can take it; four times as long after each
further loss, up to the third."""

_FIRST_TOKEN: Final = FirstToken()


class JobLifecycle:
    """Streams and attempts of the jobs in flight.

    `prefills` counts prefills by worker and result. The owner sets `request_tick`, `on_retry`, which offers a job again
    after a delay in seconds, and `on_idle`, called when the last job has ended.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        lanes: Mapping[Lane, LanePolicy],
        pool: Pool,
        clock: Clock,
        events: JobEvents,
        cancel_sender: CancelSender,
        usage_validator: UsageValidator,
        gpu_accounting: GpuAccounting,
        budget: Budget | None = None,
        overflow: OverflowRouter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._clock = clock
        self._now = clock.now
        self._events = events
        self._cancel_sender = cancel_sender
        self._usage_validator = usage_validator
        self._gpu_accounting = gpu_accounting
        self._budget = budget
        self._overflow = overflow
        if budget is not None and budget.charges_gpu_time():
            gpu_accounting.on_accrued = self.gpu_time_accrued
        self._settings_version = 0
        self._trial: LaneTrial | None = None
        self.use_lanes(lanes, 0, None)
        self.demux = Demux()
        self._cancel_reasons: dict[str, GatewayError] = {}
        self._budget_stopped: set[str] = set()
        self.prefills: dict[tuple[str, ...], float] = {}
        self.request_tick: Callable[[], None] = lambda: None
        self.on_retry: Callable[[str, float], None] = lambda job_id, delay_s: None
        self.on_idle: Callable[[], None] = lambda: None

    def use_lanes(self, lanes: Mapping[Lane, LanePolicy], version: int, trial: LaneTrial | None) -> None:
        """Judge by other SLO targets, and note the settings version with attempts that begin."""
        self._slo_targets = {
            lane: (policy.ttft_ms / 1000, (policy.itl_ms or 0) / 1000)
            for lane, policy in lanes.items()
            if policy.ttft_ms is not None
        }
        self._settings_version = version
        self._trial = trial

    # -- before the worker -------------------------------------------------------------------------------------------

    def open(self, job: InferenceJob, granted_tokens: int, predicted: PredictedWait) -> JobStream:
        """The stream of a new job, which is not queued yet."""
        attempt = self._new_attempt(job)
        attempt.grant(granted_tokens)
        attempt.predicted = predicted
        return self.demux.open(attempt)

    def settle_overflow(self, attempt: Attempt) -> None:
        """Charge what an attempt on a hosted worker cost, and return the rest of what was reserved for it."""
        if attempt.job.overflow is not None and self._overflow is not None:
            self._overflow.settle(attempt)

    def queued(self, attempt: Attempt, now: float) -> None:
        self._events.queued(attempt, now)

    def sent(self, plan: BatchPlan, now: float) -> None:
        for job in plan.jobs:
            stream = self.demux.get(job.job_id)
            assert stream is not None, "a planned job has a stream"
            attempt = stream.attempt
            attempt.sent(plan, now)
            attempt.decision = self._scheduler.decision(job.job_id, now)
            self._events.sent(attempt, now)

    def stop(self, attempt: Attempt, reason: GatewayError) -> PendingCancel | None:
        """Have the worker end a running attempt for this reason."""
        plan, job_id = attempt.plan, attempt.job.job_id
        if plan is None:
            return None
        self._cancel_reasons[job_id] = reason
        return self._cancel_sender.send(plan.worker, job_id)

    def is_stopping(self, job_id: str) -> bool:
        return job_id in self._cancel_reasons

    # -- items -------------------------------------------------------------------------------------------------------

    def emit(self, plan: BatchPlan, item: Item) -> None:
        """Takes an item from a worker. Runs once per item: the hot path."""
        stream = self.demux.get(item.job_id)
        if stream is None:
            return  # late: the job has ended
        attempt = stream.attempt
        if attempt.plan is not plan:
            return  # late: another attempt continues the job
        now = self._now()
        if type(item) is not Delta:
            if isinstance(item, (Done, Failed)):  # compiled code would make an object of `Done | Failed`
                self.attempt_ended(stream, item, now)
                self.request_tick()
            elif isinstance(item, Placed):
                attempt.placed = item
            elif isinstance(item, Restarted):
                self._restarted(stream, item)
            return
        if item.tokens:
            job = attempt.job
            is_first = attempt.last_token_at is None
            if is_first:
                attempt.first_token(now)
                self._events.first_token(attempt, now)
                self._scheduler.progress(job.job_id, _FIRST_TOKEN, now)
            else:
                self._events.produced(attempt, now)
                attempt.last_token_at = now
            slo_target = self._slo_targets.get(job.lane)
            if (
                slo_target is not None
                and now - attempt.slo_start_at > slo_target[0] + attempt.output_tokens * slo_target[1]
            ):
                attempt.slo_attained = False
            attempt.output_tokens += item.tokens
            if attempt.output_tokens >= attempt.renew_at_tokens and not self._may_continue(attempt, item):
                if is_first:
                    self.request_tick()
                return
            if attempt.output_tokens >= attempt.reported_tokens + PROGRESS_INTERVAL_TOKENS:
                self._scheduler.progress(job.job_id, Produced(attempt.output_tokens - attempt.reported_tokens), now)
                attempt.reported_tokens = attempt.output_tokens
            if is_first and not item.is_last:  # else the end follows, with a tick of its own
                stream.push(item)
                self.request_tick()  # after the reader, whose frame to another process leaves in the same turn
                return
        stream.push(item)

    def _restarted(self, stream: JobStream, item: Restarted) -> None:
        """The worker has passed the job on, and the process that runs it has begun another attempt."""
        attempt, is_void = stream.attempt, item.resume_point is None
        attempt.job = replace(attempt.job, attempt=item.attempt, resume_point=item.resume_point)
        attempt.output_tokens = attempt.reported_tokens = 0
        stream.begin_attempt(attempt, from_start=is_void)

    def _may_continue(self, attempt: Attempt, item: Delta) -> bool:
        """Whether the delta may be delivered. A job whose budget is used up is stopped, and ends as `Done`."""
        job, budget = attempt.job, self._budget
        assert budget is not None, "a grant comes from a budget"
        if job.job_id not in self._budget_stopped:
            before = 0 if job.resume_point is None else len(job.resume_point.output_ids)
            attempt.grant(budget.renew_grant(job.job_id, before + attempt.output_tokens))
            if attempt.output_tokens < max(attempt.granted_tokens, attempt.renew_at_tokens):
                return True
            self._stop_at_ceiling(attempt, budget)
            if attempt.output_tokens == attempt.granted_tokens:
                return True
        attempt.output_tokens -= item.tokens
        return False

    def gpu_time_accrued(self, attempt: Attempt, gpu_seconds: float) -> None:
        """Stop a job whose GPU time so far costs more than its budget leaves. A pooled job is short: it may end."""
        job, budget = attempt.job, self._budget
        if budget is None or job.payload.pooled is not None or self.is_stopping(job.job_id):
            return
        if job.prefill is not None:
            gpu_seconds += job.prefill.gpu_seconds
        if not budget.lease_gpu_time(job.job_id, gpu_seconds):
            self._stop_at_ceiling(attempt, budget)

    def _stop_at_ceiling(self, attempt: Attempt, budget: Budget) -> None:
        """The job gets no further lease: no further delta is delivered, and it ends as `Done`."""
        job_id = attempt.job.job_id
        self._budget_stopped.add(job_id)
        self.stop(attempt, budget.exhausted_error(job_id))
        attempt.renew_at_tokens = 0  # every further delta exceeds the grant

    # -- ends --------------------------------------------------------------------------------------------------------

    def attempt_ended(self, stream: JobStream, end: End, now: float) -> None:
        """The worker has ended its attempt. The job ends too, unless another attempt may continue it."""
        if type(end) is Done and stream.attempt.job.payload.pooled is not None:
            self._answered(stream.attempt, now)
        end = self._usage_validator.corrected(stream.attempt, end)
        if self._cancel_reasons:
            reason = self._cancel_reasons.pop(end.job_id, None)
            if end.job_id in self._budget_stopped:
                end = budget_stop(stream.attempt, end, reason)
            elif reason is not None and isinstance(end, Failed):
                end = replace(end, error=reason)
        if isinstance(end, Failed) and end.error.can_failover and self._may_retry(end.error):
            if stream.attempt.job.route.role == "prefill":
                self._count_prefill(stream.attempt, end, now)
            retry = next_attempt(stream.attempt, end)
            if isinstance(retry, Retry):
                self._retry(stream, end, retry, now)
                return
            end = retry or end
        self.end(stream, end, now)

    def _answered(self, attempt: Attempt, now: float) -> None:
        """A pooled job has no tokens: its whole answer counts as its first token."""
        attempt.first_token(now)
        self._events.first_token(attempt, now)
        slo_target = self._slo_targets.get(attempt.job.lane)
        if slo_target is not None and now - attempt.slo_start_at > slo_target[0]:
            attempt.slo_attained = False

    def _count_prefill(self, attempt: Attempt, end: Failed, now: float) -> None:
        """A prefill has ended, in one way or the other. Its token goes nowhere, but is the first of its engine."""
        is_ready = isinstance(end.error, Prefilled)
        if is_ready:
            attempt.first_token(now)
            self._events.first_token(attempt, now)
        if attempt.plan is not None:
            key = (attempt.plan.worker, "handed_over" if is_ready else "failed")
            self.prefills[key] = self.prefills.get(key, 0) + 1

    def _may_retry(self, error: GatewayError) -> bool:
        return (error.retry_after_s or 0.0) <= self._pool.policy.no_worker_timeout_s

    def _retry(self, stream: JobStream, end: Failed, retry: Retry, now: float) -> None:
        """Account for the attempt that is over and offer the job again."""
        lost = stream.attempt
        if self._budget is not None and (unwelcome := self._budget.retry_refusal(retry.job)) is not None:
            self.end(stream, replace(end, error=unwelcome), now)
            return
        self._gpu_accounting.meter(lost, engine_usage(lost.job, end.usage), now)
        lost.ended(end, now)
        is_handover = isinstance(end.error, Prefilled)
        lost.resumed = None if is_handover else not retry.from_start
        self._settle(lost, end, now)
        if is_handover and retry.job.prefill is not None:
            prefill = replace(retry.job.prefill, gpu_seconds=lost.gpu_seconds or 0.0)
            retry = replace(retry, job=replace(retry.job, prefill=prefill))
        attempt = self._new_attempt(retry.job)
        # The grant stays; tokens lost with a worker are not charged.
        attempt.grant(lost.granted)
        attempt.slo_attained = lost.slo_attained
        slo_target = self._slo_targets.get(retry.job.lane)
        if retry.job.resume_point is not None and slo_target is not None:
            attempt.slo_start_at += len(retry.job.resume_point.output_ids) * slo_target[1]
        stream.begin_attempt(attempt, from_start=retry.from_start)
        self._events.queued(attempt, now)
        job_id = retry.job.job_id
        losses = retry.job.attempt - 1 - retry.job.preemptions - (retry.job.prefill is not None)
        route = retry.job.route
        if not losses or self._pool.serves_elsewhere(route.model, route.avoid, route.precision):
            self.on_retry(job_id, 0.0)
        else:
            self.on_retry(job_id, max(RETRY_DELAY_S * 4 ** min(losses - 1, 2), end.error.retry_after_s or 0.0))

    def end(self, stream: JobStream, end: End, now: float) -> None:
        """The one place where a job ends."""
        attempt = stream.attempt
        job = attempt.job
        self._cancel_reasons.pop(job.job_id, None)
        self._budget_stopped.discard(job.job_id)
        if self._budget is not None and is_budget_capped(job, end):
            end = replace(end, stopped=self._budget.exhausted_error(job.job_id), stopped_by_engine=True)
        worked = end
        if job.prefill is not None:
            worked, end = replace(end, usage=engine_usage(job, end.usage)), billed_end(job, end)
        self._gpu_accounting.meter(attempt, worked.usage, now)
        attempt.ended(end, now)
        # A shared execution has used nothing of this job's, also before it was resumed.
        usage = attempt.usage() if attempt.shared_with is not None else total_usage(job, attempt.usage())
        cost = None if self._budget is None else self._budget.ended(attempt, usage, now)
        self._settle(attempt, worked, now, cost)
        if job.resume_point is not None and isinstance(end, Done):
            delivered = usage if attempt.shared_with is None else total_usage(job, end.usage)
            end = replace(end, usage=delivered, raw=b"")
        self.demux.close(stream, end)
        if not len(self.demux):
            self.on_idle()

    def _settle(self, attempt: Attempt, end: End, now: float, cost: int | None = None) -> None:
        """Release what an attempt held and publish its end. `end` has the engine's own usage. An attempt whose job is
        retried has no cost: the last one pays for what was delivered.
        """
        usage = end.usage
        if not isinstance(end, Done):
            self._judge_missing_token(attempt, now)
        self._scheduler.progress(
            attempt.job.job_id,
            Ended(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
            if isinstance(end, Done)
            else Ended(output_tokens=max(usage.output_tokens, attempt.output_tokens)),
            now,
        )
        self.settle_overflow(attempt)
        attempt.ledger_entry = attempt.entry(self._clock.wall(), cost)
        self._events.ended(attempt, now)

    def _judge_missing_token(self, attempt: Attempt, now: float) -> None:
        """The next token never came. If it was due before the end, the attempt has missed its target."""
        slo_target = self._slo_targets.get(attempt.job.lane)
        if slo_target is None:
            return
        if now - attempt.slo_start_at > slo_target[0] + attempt.output_tokens * slo_target[1]:
            attempt.slo_attained = False

    def _new_attempt(self, job: InferenceJob) -> Attempt:
        attempt = Attempt(job)
        if job.lane in self._slo_targets:
            attempt.slo_attained = True
        trial = self._trial
        is_tried = trial is not None and trial.split.takes(job.tenant, job.run_id)
        attempt.settings_version = trial.version if trial is not None and is_tried else self._settings_version
        return attempt
