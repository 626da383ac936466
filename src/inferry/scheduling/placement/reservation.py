"""Which worker is reserved for a job that goes next and that no worker accepts.

The job can start on one worker only, so one is reserved, and it stays the same until the job goes: with another choice
at every change other jobs would use what has drained so far.
"""

from inferry.scheduling.placement.route_filter import RouteFilter
from inferry.scheduling.placement.worker_groups import load_of
from inferry.scheduling.queues.queued_job import BlockedHead, QueuedJob
from inferry.scheduling.worker_state import WorkerState


def worker_to_reserve(entry: QueuedJob, blocked: BlockedHead, route: RouteFilter, fill: float) -> WorkerState:
    """The worker reserved before, else one that only its prefill rate keeps the job from, else the least loaded."""
    reserved = None if blocked.reserved_worker is None else route.worker_named(blocked.reserved_worker)
    if reserved is None:
        if blocked.retry_at is not None:  # on some worker only the prefill rate kept it out
            rate_limited = [worker for worker in route.workers if worker.is_only_rate_limited(entry, fill)]
            reserved = min(rate_limited, key=load_of, default=None)
        if reserved is None:
            reserved = min([tier.least() for tier in route.tiers], key=load_of)
        blocked.reserved_worker = reserved.name
    return reserved


def reserve_for_share(entry: QueuedJob, blocked: BlockedHead, route: RouteFilter, walk: int) -> None:
    """Reserve one worker for a job that its lane's share lets go first: all others keep accepting higher lanes.

    A job that only the prefill rate keeps out waits for time alone, so the worker is reserved from paced lanes only.
    Otherwise it is reserved from all lanes until it has drained enough.
    """
    worker = worker_to_reserve(entry, blocked, route, 1.0)
    best = worker.best_decoding_lane
    worker.closed_in_walk = walk
    worker.closed_from_lane = best + 1 if best is not None and worker.is_only_rate_limited(entry, 1.0) else 0
    for worker_set in worker.worker_sets:
        worker_set.touched_in_walk = walk
