"""When a job that arrives is held, and when a held job is released.

`adaptive` holds only where that pays: a later job joins the running batch of a worker that batches continuously. Jobs
that embed or score are small and cheaper as one request, so they are held while a pass of such jobs runs.
"""

from collections.abc import Sequence
from math import inf

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.scheduling.batching.hold_rule import HoldRule
from inferry.scheduling.lane_rules import LaneRules
from inferry.scheduling.queues.lane_queue import RouteQueue
from inferry.scheduling.queues.queued_job import QueuedJob


def hold_limit(entry: QueuedJob, queue: RouteQueue, hold_rules: Sequence[HoldRule], now: float) -> float | None:
    """The latest time until which a job that arrives now is held; None where it is not."""
    rules = queue.rules
    if rules.window != "fixed" and not entry.job.prefix and not queue.route.any_pads and not queue.route.is_pooled:
        return None  # the common case: it has no siblings and joins the running batch
    if rules.window == "off" or rules.coalesce_s <= 0 or queue.route.is_remote:
        return None
    for rule in hold_rules:
        until = rule.hold_until(entry, queue, now)
        if until is not None:
            entry.held_by = rule.name
            return until
    return None


def should_keep_holding(queue: RouteQueue) -> bool:
    """Whether held jobs stay held after a change of workers or rules. A worker without a pass releases them, and so
    does a change to other rules.
    """
    route = queue.route
    if not queue.is_in_use():
        return False
    return queue.rules.window == "fixed" or (route.all_pad is route.any_pads and not route.has_free_pass())


def hold_expiry(job: InferenceJob, rules: LaneRules, latest_at: float = inf) -> tuple[float, ReleaseReason]:
    """The end of the hold, counted from the job's arrival, and the limit that sets it."""
    arrived_at = job.arrived_at
    until, reason = min(arrived_at + rules.coalesce_s, latest_at), ReleaseReason.WINDOW
    if job.deadline is not None and (half_deadline_at := arrived_at + (job.deadline - arrived_at) / 2) < until:
        until, reason = half_deadline_at, ReleaseReason.DEADLINE
    if (max_wait_at := arrived_at + min(job.max_wait_s, rules.max_wait_s)) < until:
        until, reason = max_wait_at, ReleaseReason.MAX_WAIT
    return until, reason


def is_full(queue: RouteQueue) -> bool:
    """Whether the jobs held together fill a plan or a worker."""
    if len(queue.held) >= queue.rules.max_batch:
        return True
    workers, fill = queue.route.workers, queue.rules.fill
    return bool(workers) and not any(
        len(queue.held) < worker.sequence_limit * fill
        and queue.held_prefill_tokens < worker.prefill_limit * fill
        and queue.held_kv_tokens < worker.kv_limit * fill
        for worker in workers
    )
