"""Admission to the queue: the predicted wait of a job, or its refusal.

Subscribes to `queued`, `sent` and `ended`, to learn how the predicted waits turned out.
"""

from typing import Final

from inferry.admission.queue_limiter import QueueLimiter
from inferry.dispatch.overflow import OverflowRouter
from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError, InvalidRequest, QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import PredictedWait
from inferry.prediction.wait_model import NOTHING_AHEAD, WaitModel, deadline_refusal
from inferry.prediction.wait_prediction import WaitPrediction
from inferry.scheduling.scheduler import Scheduler

_NO_WAIT: Final = PredictedWait(0.0, 0.0)
"""Of jobs that overflow. They teach the wait model nothing about own workers."""


class QueueAdmission:
    """Predicts waits from what the scheduler has queued, and enforces deadlines and queue limits on arrival."""

    def __init__(
        self, scheduler: Scheduler, limiter: QueueLimiter, waits: WaitModel, overflow: OverflowRouter | None = None
    ) -> None:
        self._scheduler = scheduler
        self._limiter = limiter
        self._waits = waits
        self._overflow = overflow

    def may_overflow(self, job: InferenceJob) -> bool:
        """Whether a hosted worker could serve the job."""
        return self._overflow is not None and self._overflow.may_take(job)

    def overflow_batch(self, job: InferenceJob) -> int:
        """The batch of watermarks that an admitted job waits for because it overflows; 0 for none."""
        return 0 if job.overflow is None or self._overflow is None else self._overflow.watermark_batch(job.job_id)

    def admit(
        self, job: InferenceJob, now: float, refusal: GatewayError | None = None
    ) -> tuple[InferenceJob, PredictedWait]:
        """The job and its predicted wait. A job that would be late may be redirected to a hosted worker, where it does
        not wait; with `refusal`, own workers cannot take it. Raises that, QueueFull, or DeadlineInfeasible if the
        deadline would pass in the queue.
        """
        prediction = in_time = self._predict(job, job.tenant, now)
        if self._overflow is not None:
            in_time = self._overflow.waits.predict(job, prediction.ahead, now)
            overflowed = self._overflow.redirect(job, in_time.p90_s, now, is_served=refusal is None)
            if overflowed is not None:
                return overflowed, _NO_WAIT
        if refusal is not None:
            raise refusal
        too_late = None if job.deadline is None else deadline_refusal(self._waits, job, in_time, now)
        if too_late is not None and self._scheduler.has_rivals(job):
            raise too_late
        if not self._limiter.has_space(job):
            self._check_limits(job, self._predict(job, None, now), now)
        return job, prediction

    def check_space(self, job: InferenceJob, count: int, now: float) -> None:
        """Raises QueueFull where the lane has no space for `count` jobs more, InvalidRequest where it never has."""
        depth, limit = self._limiter.depth_and_limit(job.lane)
        if count > limit:
            raise InvalidRequest(f"the call has {count} prompts; lane {job.lane.name} queues at most {limit} jobs")
        if depth + count > limit:
            prediction = self._predict(job, None, now)
            full = QueueFull(f"lane {job.lane.name} has {depth} jobs queued: no space for {count} more")
            if prediction.estimate_s > 0:
                full.predicted_wait_s = prediction.p50_s
                full.retry_after_s = self._waits.retry_after(prediction)
            raise full

    def _predict(self, job: InferenceJob, tenant: str | None, now: float) -> WaitPrediction:
        """The wait of the job as the tenant's next one; with None, behind all jobs of its lane."""
        lane, footprint = job.lane, job.footprint
        ahead = self._scheduler.ahead(lane, tenant) if self._waits.has_queue_ahead(lane) else NOTHING_AHEAD
        return self._waits.predict(lane, footprint.prefill_tokens, footprint.output.expected, ahead, now)

    def _check_limits(self, job: InferenceJob, prediction: WaitPrediction, now: float) -> None:
        refusal = self._limiter.refusal(job, *self._waits.seconds_per_job(prediction), now)
        if refusal is not None:
            if prediction.estimate_s > 0:
                refusal.predicted_wait_s = prediction.p50_s
                if refusal.retry_after_s is None:
                    refusal.retry_after_s = self._waits.retry_after(prediction)
            raise refusal

    # -- events ------------------------------------------------------------------------------------------------------

    def queued(self, attempt: Attempt, now: float) -> None:
        prediction = attempt.predicted
        if isinstance(prediction, WaitPrediction):
            self._waits.queued(prediction, now)
        else:
            self._waits.depth_changed(attempt.job.lane, now)

    def sent(self, attempt: Attempt, now: float) -> None:
        prediction = attempt.predicted
        if isinstance(prediction, WaitPrediction):
            self._waits.sent(prediction, now)
        else:
            self._waits.depth_changed(attempt.job.lane, now)

    def ended(self, attempt: Attempt, now: float) -> None:
        if attempt.sent_at is None:
            prediction = attempt.predicted
            if isinstance(prediction, WaitPrediction):
                self._waits.left(prediction, now)
            else:
                self._waits.depth_changed(attempt.job.lane, now)
