"""A scheduler with short sentences: what a test says and what it reads off a tick."""

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import Ended, FirstToken, Tick
from inferry.domain.workers import WorkerView
from inferry.scheduling.scheduler import Scheduler
from support.builders import a_policy


def a_scheduler(*views: WorkerView, **policies: LanePolicy) -> Scheduler:
    """Lanes that are not named hold nobody and own no share: `a_scheduler(a_view(), P1=a_policy(share=0.1))`."""
    scheduler = Scheduler({lane: policies.get(lane.name, a_policy()) for lane in Lane})
    for view in views:
        scheduler.observe(view, 0.0)
    return scheduler


def depths(scheduler: Scheduler, *lanes: Lane) -> dict[Lane, int]:
    """Queued jobs by lane, of all lanes or of these."""
    at_or_above = [scheduler.ahead(lane).jobs for lane in Lane]
    return {lane: at_or_above[lane] - (at_or_above[lane - 1] if lane else 0) for lane in lanes or Lane}


def offer(scheduler: Scheduler, *jobs: InferenceJob, now: float | None = None) -> None:
    """Offer jobs as they arrive, or all of them at `now`."""
    for job in jobs:
        scheduler.offer(job, job.arrived_at if now is None else now)


def first_token(scheduler: Scheduler, *job_ids: str, now: float = 0.0) -> None:
    for job_id in job_ids:
        scheduler.progress(job_id, FirstToken(), now)


def end(scheduler: Scheduler, *job_ids: str, now: float = 0.0) -> None:
    for job_id in job_ids:
        scheduler.progress(job_id, Ended(), now)


def sent(tick: Tick) -> list[str]:
    """The jobs planned, in order."""
    return [job.job_id for plan in tick.plans for job in plan.jobs]


def batches(tick: Tick) -> list[list[str]]:
    return [[job.job_id for job in plan.jobs] for plan in tick.plans]


def reasons(tick: Tick) -> list[str]:
    return [plan.reason.value for plan in tick.plans]


def placements(tick: Tick) -> dict[str, str]:
    return {job.job_id: plan.worker for plan in tick.plans for job in plan.jobs}


def expired(tick: Tick) -> list[str]:
    return [job.job_id for job in tick.expired]
