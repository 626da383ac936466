"""What a job is told before it is queued: how long it would wait, or that it may not come in now."""

from inferry.admission.queue_limiter import QueueLimiter
from inferry.domain.jobs import InferenceJob
from inferry.prediction.wait_model import NOTHING_AHEAD, WaitModel
from inferry.prediction.wait_prediction import WaitPrediction
from inferry.scheduling.scheduler import Scheduler


def predict_wait(
    scheduler: Scheduler, waits: WaitModel, job: InferenceJob, tenant: str | None, now: float
) -> WaitPrediction:
    """The job's wait if it came now as one of the tenant's; with None, behind everybody in its lane."""
    lane, footprint = job.lane, job.footprint
    ahead = scheduler.ahead(lane, tenant) if waits.has_queue_ahead(lane) else NOTHING_AHEAD
    return waits.predict(lane, footprint.prefill_tokens, footprint.output.expected, ahead, now)


def renew_at_tokens(
    queue_limiter: QueueLimiter, waits: WaitModel, job: InferenceJob, prediction: WaitPrediction, now: float
) -> None:
    """Raises QueueFull where the job may not be queued, with what is known of when it may."""
    refusal = queue_limiter.refusal(job, *waits.seconds_per_job(prediction), now)
    if refusal is not None:
        if prediction.estimate_s > 0:
            refusal.predicted_wait_s = prediction.p50_s
            if refusal.retry_after_s is None:
                refusal.retry_after_s = waits.retry_after(prediction)
        raise refusal
