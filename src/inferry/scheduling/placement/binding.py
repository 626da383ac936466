"""Which limit keeps the head of a queue from its workers. Changes nothing but the queue's `bound`."""

from inferry.domain import decisions
from inferry.scheduling.queues.bound_interval import bound_by
from inferry.scheduling.queues.lane_queue import RouteQueue
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.worker_state import WorkerState


def bind_refused(queue: RouteQueue, entry: QueuedJob, fill: float, walk: int, now: float) -> None:
    """No worker accepted the job. The limit is that of the least loaded worker of its first group."""
    tiers, bound = queue.route.tiers, queue.bound
    if not tiers:
        bind_closed(queue, now)
        return
    group = tiers[0]
    worker = group.least()
    limit = _limit_of(worker, entry, fill)
    if limit is None:  # it fits: the worker is reserved
        limit = decisions.LANE_SHARE if group.touched_in_walk == walk else decisions.JOB_AHEAD
    queue.bound = bound_by(bound, limit, worker.name, now)


def bind_closed(queue: RouteQueue, now: float) -> None:
    """The queue was not looked at: its workers are reserved for a job ahead of it, or it has none."""
    tiers, bound = queue.route.tiers, queue.bound
    if tiers:
        queue.bound = bound_by(bound, decisions.JOB_AHEAD, tiers[0].least().name, now)
    else:
        queue.bound = bound_by(bound, queue.route.unavailable, None, now)


def _limit_of(worker: WorkerState, entry: QueuedJob, fill: float) -> str | None:
    """The limit that keeps the job from the worker, in the order of `WorkerState.accepts`; None where it fits."""
    rules, sequences = entry.rules, worker.sequences
    if entry.stays_in_groups and rules.groups is not None and worker.group not in rules.groups:
        return decisions.WORKER_GROUP
    if sequences >= worker.sequence_limit * fill:
        return decisions.SEQUENCES if sequences >= worker.sequence_limit else decisions.LANE_RESERVE
    if sequences >= worker.batch_limit and not rules.is_live:
        return decisions.BATCH_SEQUENCES
    if not worker.has_prefill_capacity(entry, fill):
        return decisions.LANE_RESERVE if worker.has_prefill_capacity(entry, 1.0) else decisions.PREFILL_TOKENS
    if worker.is_full_for(entry, fill):
        return decisions.LANE_RESERVE if not worker.is_full_for(entry, 1.0) else decisions.KV_TOKENS
    if worker.pads and not worker.can_join_pass(entry):
        return decisions.PADDED_BATCH
    return decisions.PREFILL_RATE if worker.prefill_bucket is not None and worker.is_paced(entry.lane) else None
