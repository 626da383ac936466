"""What a job is told before it is queued: how long it would wait, or that it may not come in now."""

from inferry.admission.door import Door
from inferry.admission.told import Told
from inferry.admission.waits import NOBODY, WaitModel
from inferry.domain.jobs import InferenceJob
from inferry.scheduling.scheduler import Scheduler


def predict(scheduler: Scheduler, waits: WaitModel, job: InferenceJob, tenant: str | None, now: float) -> Told:
    """The job's wait if it came now as one of the tenant's; with None, behind everybody in its lane."""
    lane, footprint = job.lane, job.footprint
    ahead = scheduler.ahead(lane, tenant) if waits.is_behind_somebody(lane) else NOBODY
    return waits.predict(lane, footprint.prefill_tokens, footprint.output.expected, ahead, now)


def ask_at(door: Door, waits: WaitModel, job: InferenceJob, told: Told, now: float) -> None:
    """Raises QueueFull where the job may not be queued, with what is known of when it may."""
    refusal = door.refusal(job, *waits.each_s(told), now)
    if refusal is not None:
        if told.middle_s > 0:
            refusal.predicted_wait_s = told.p50_s
            if refusal.retry_after_s is None:
                refusal.retry_after_s = waits.retry_after(told)
        raise refusal
