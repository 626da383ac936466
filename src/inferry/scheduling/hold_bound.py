"""When a job may no longer be held back: the gateway is never much slower than the engine alone.

Holding a job back protects other jobs. How long is bounded by what the engine alone would do with the same arrivals
(`capacity.direct_engine`): a first token there comes after the wait of the lane, plus the time of the job's own prompt.
After `HOLD_FACTOR` times that, the worker is used as the engine alone would be: whenever it has less than one chunk of
prompts in flight, the next job of the highest lane goes, without the prefill rate and the limits of batch jobs. After
`TURN_FACTOR` times that, the overdue job itself goes next.

While a worker of the route is down there is no bound: without the gateway the calls of that worker would have failed,
and those that it runs again are more than the engines that are left can serve in time.
"""

from typing import Final

from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.queues.lane_queue import LaneQueue, RouteQueue
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.worker_state import WorkerState

HOLD_FACTOR: Final = 1.25
TURN_FACTOR: Final = 1.75


def overdue_at(entry: QueuedJob, worker: WorkerState, factor: float) -> float | None:
    """When the job's first token would be later than `factor` times that of the engine alone; None: never."""
    direct = worker.direct
    if direct is None:
        return None
    alone_s = entry.cold_tokens * direct.prompt_token_s
    return entry.job.arrived_at + factor * (direct.waits_s[entry.lane] + alone_s) - alone_s


def overdue_queues(lane_queues: list[LaneQueue], tick_context: TickContext, walk: int) -> list[RouteQueue]:
    """The queues whose oldest job is overdue, higher lanes first. Schedules a retry for the others.

    Only one worker of a queue is looked at, in rotation: a walk costs the same with many workers.
    """
    overdue: list[RouteQueue] = []
    for lane_queue in lane_queues:
        for queue in lane_queue.waiting:
            workers, oldest = queue.route.workers, queue.oldest()
            if not workers or oldest is None or queue.route.has_lost_worker:
                continue
            at = overdue_at(oldest, workers[walk % len(workers)], HOLD_FACTOR)
            if at is None:
                continue
            if at <= tick_context.now:
                overdue.append(queue)
            else:
                tick_context.schedule_retry(at)
    return overdue


def next_released(queue: RouteQueue, tick_context: TickContext, walk: int) -> tuple[QueuedJob, RouteQueue] | None:
    """The job that goes for the overdue head of the queue: of a higher lane if one waits, else the oldest job itself.

    None where the oldest job of the queue is not overdue any more.
    """
    oldest = queue.oldest()
    workers, now = queue.route.workers, tick_context.now
    if oldest is None or not workers:
        return None
    worker = workers[walk % len(workers)]
    at = overdue_at(oldest, worker, HOLD_FACTOR)
    if at is None or at > now:
        return None
    turn_at = overdue_at(oldest, worker, TURN_FACTOR)
    if turn_at is not None and now < turn_at:
        for lane_queue in queue.lane_queue.above:
            for higher in lane_queue.waiting:
                head = higher.head()
                if head is not None and higher.route.overlaps(queue.route):
                    return higher.select_next(head, now), higher
    return oldest, queue
