"""When a job stops waiting for company. Holding never overrides room: what is released still waits for that."""

from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import ReleaseReason
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.placing.routes import Route


def holds(line: Line, route: Route) -> bool:
    """Whether the lane holds jobs for company in front of the route's workers as they are now."""
    window = line.window
    if window == "off" or line.coalesce_s <= 0:
        return False
    return window == "fixed" or _company_pays(route)


def _company_pays(route: Route) -> bool:
    """Company is worth waiting for only while every worker is in a padded pass that nobody can join."""
    return route.all_pad and all(worker.sequences > 0 for worker in route.workers)


def hold_until(job: InferenceJob, line: Line) -> tuple[float, ReleaseReason]:
    """The latest moment the job is held to, and why not longer. Counted from arrival, however late it is offered."""
    arrived = job.arrived_at
    until, reason = arrived + line.coalesce_s, ReleaseReason.WINDOW
    if job.deadline is not None and (halfway := arrived + (job.deadline - arrived) / 2) < until:
        until, reason = halfway, ReleaseReason.DEADLINE
    if (patience := arrived + min(job.max_wait_s, line.max_wait_s)) < until:
        until, reason = patience, ReleaseReason.MAX_WAIT
    return until, reason


def is_full(queue: Queue) -> bool:
    """Whether the jobs held together are all that one plan or one worker can take."""
    if len(queue.held) >= queue.line.policy.max_batch:
        return True
    workers, fill = queue.route.workers, queue.line.fill
    return bool(workers) and not any(
        len(queue.held) < worker.sequence_limit * fill
        and queue.held_prefill_tokens < worker.prefill_limit * fill
        and queue.held_kv_tokens < worker.kv_limit * fill
        for worker in workers
    )
