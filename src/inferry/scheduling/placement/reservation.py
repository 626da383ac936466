"""Which worker is kept for a job that is first and finds no room.

It can start on one worker only, so one is kept for it, and it stays the same one until the job goes: another choice
with every change would let others have what has drained so far.
"""

from inferry.scheduling.batching.packing import WorkerState
from inferry.scheduling.placement.worker_groups import load_of
from inferry.scheduling.queues.queued_job import BlockedHead, QueuedJob


def worker_to_reserve(entry: QueuedJob, blocked: BlockedHead, fill: float) -> WorkerState:
    """The worker that is kept: one that lacks nothing but pace for the job, if there is one, else the least loaded."""
    route, reserved_worker = entry.queue.route, blocked.reserved_worker
    if reserved_worker is None or not route.has(reserved_worker):
        if blocked.retry_at is not None:  # somewhere it lacked only pace
            rate_limited = [worker for worker in route.workers if worker.is_only_rate_limited(entry, fill)]
            reserved_worker = min(rate_limited, key=load_of, default=None)
        if reserved_worker is None or not route.has(reserved_worker):
            reserved_worker = min([tier.least() for tier in route.tiers], key=load_of)
        blocked.reserved_worker = reserved_worker
    return reserved_worker


def reserve_for_share(entry: QueuedJob, blocked: BlockedHead, walk: int) -> None:
    """Keep one worker for a job whose turn it is and that finds no room: all others go on taking its betters.

    Where it lacks nothing but pace it waits for time alone, so the worker is kept only from lanes that are paced as
    well. Else it is kept from everybody until it has drained enough.
    """
    worker = worker_to_reserve(entry, blocked, 1.0)
    worker.closed_in_walk = walk
    worker.closed_from_lane = worker.best_decoding_lane + 1 if worker.is_only_rate_limited(entry, 1.0) else 0
    for worker_group in worker.worker_groups:
        worker_group.touched_in_walk = walk
