"""The decision about one job, from its entry."""

from inferry.domain.decisions import Decision
from inferry.scheduling.queues.bound_interval import waits_between
from inferry.scheduling.queues.lane_queue import LaneQueue
from inferry.scheduling.queues.queued_job import HELD, PAUSED, PLANNED, READY, QueuedJob


def decision_of(entry: QueuedJob, lane_queue: LaneQueue | None, now: float) -> Decision:
    """Why the job is held or was, and why its worker was picked."""
    state = entry.state
    # Mostly the queue of the latest job, which is found without a hash. One that became empty may be gone.
    queue = None if lane_queue is None else lane_queue.latest_queue
    if lane_queue is not None and (queue is None or queue.key is not entry.queue_key):
        queue = lane_queue.queues.get(entry.queue_key)
    bound, held_s = None, entry.held_s
    if state is HELD or state is PAUSED:
        held_s = now - entry.ready_at
    elif state is not READY:
        bound = entry.bound
    elif queue is not None:
        bound = queue.bound
    charged_tokens = entry.charged_tokens if state is PLANNED else 0
    return Decision(
        picked_by=entry.picked_by if state is PLANNED else None,
        candidates=0 if queue is None else len(queue.route.workers),
        filtered=None if queue is None else queue.route.filtered,
        cached_tokens=max(0, entry.job.footprint.prompt.expected - charged_tokens) if charged_tokens else 0,
        held_by=entry.held_by if held_s > 0 else None,
        held_s=held_s,
        limit=None if bound is None else bound.limit,
        limit_worker=None if bound is None else bound.worker,
        waits=None if bound is None else waits_between(entry.bound_when_ready, entry.ready_at, bound, now),
        overflow=entry.job.overflow,
    )
