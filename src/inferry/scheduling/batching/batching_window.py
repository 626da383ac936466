"""When a job stops waiting for company. Holding never overrides room: what is released still waits for that.

`adaptive` holds only where that pays. Whoever comes later to workers that batch continuously joins what runs, and
mostly finds in the cache what an earlier sibling computed; `sibling_window` says when that is not enough. A padded pass
can be joined by nobody, so while all workers are in one, company costs nothing; before an idle worker it costs the wait
of those who are held, and saves nearly a pass to everybody who comes in time.
"""

from math import inf

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.scheduling.batching.pass_window import PassDurations
from inferry.scheduling.queues.lane_queue import LaneQueue, RouteQueue
from inferry.scheduling.queues.queued_job import QueuedJob

PASS_FRACTION = 0.25
"""How much of a pass an idle worker is kept waiting at most: one job that comes meanwhile gains three times that."""
MIN_EXPECTED_FOLLOWERS = 0.75
"""How many jobs must be expected in that time: one that nearly always comes is enough."""


def hold_limit(entry: QueuedJob, pass_durations: PassDurations, now: float) -> float | None:
    """The latest moment to which a job that comes now may be held, as far as its queue is concerned; None: not at all.

    Called once for every job that comes, since that is also how it is learned who follows whom.
    """
    queue = entry.queue
    lane_queue, route = queue.lane_queue, queue.route
    if lane_queue.window != "fixed" and not entry.job.prefix and not route.any_pads:
        return None  # as for most: it has no siblings, and whoever comes later joins what runs
    if lane_queue.window == "off" or lane_queue.coalesce_s <= 0:
        return None
    if lane_queue.window == "fixed":
        return inf
    if route.all_pad:
        return _pass_hold_limit(queue, pass_durations, now)
    if not entry.job.prefix or route.any_pads or len(route.workers) < 2 or route.has_idle():
        return None
    return queue.sibling_windows.arrived(entry, now)


def _pass_hold_limit(queue: RouteQueue, pass_durations: PassDurations, now: float) -> float | None:
    followers, lane_queue = queue.followers, queue.lane_queue
    is_follower = followers.arrived(now)
    if not queue.route.has_idle():
        return inf
    if not is_follower:
        pass_s = pass_durations.shortest_s(queue.route.workers)
        followers.open_window(
            now + (lane_queue.coalesce_s if pass_s is None else min(lane_queue.coalesce_s, PASS_FRACTION * pass_s))
        )
    return followers.window_ends_at if followers.expected_followers >= MIN_EXPECTED_FOLLOWERS else None


def should_keep_holding(queue: RouteQueue) -> bool:
    """Whether jobs that are held go on being held when workers have changed. Before an idle one they go at once."""
    route = queue.route
    return queue.lane_queue.window == "fixed" or (route.all_pad is route.any_pads and not route.has_idle())


def hold_expiry(job: InferenceJob, lane_queue: LaneQueue, latest_at: float = inf) -> tuple[float, ReleaseReason]:
    """The latest moment the job is held to, and why not longer. Counted from arrival, however late it is offered."""
    arrived_at = job.arrived_at
    until, reason = min(arrived_at + lane_queue.coalesce_s, latest_at), ReleaseReason.WINDOW
    if job.deadline is not None and (half_deadline_at := arrived_at + (job.deadline - arrived_at) / 2) < until:
        until, reason = half_deadline_at, ReleaseReason.DEADLINE
    if (max_wait_at := arrived_at + min(job.max_wait_s, lane_queue.max_wait_s)) < until:
        until, reason = max_wait_at, ReleaseReason.MAX_WAIT
    return until, reason


def is_full(queue: RouteQueue) -> bool:
    """Whether the jobs held together are all that one plan or one worker can take."""
    if len(queue.held) >= queue.lane_queue.policy.max_batch:
        return True
    workers, fill = queue.route.workers, queue.lane_queue.fill
    return bool(workers) and not any(
        len(queue.held) < worker.sequence_limit * fill
        and queue.held_prefill_tokens < worker.prefill_limit * fill
        and queue.held_kv_tokens < worker.kv_limit * fill
        for worker in workers
    )
