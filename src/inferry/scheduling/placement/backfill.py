"""Which jobs of a queue overtake its blocked head, and when that stops.

A blocked head closes all its workers, though it can start on one of them only. So one worker is reserved for it; the
others may accept a few of the jobs behind it, where capacity came free that the head cannot use. All jobs that overtake
a head come to at most one quantum per worker, prompts and expected outputs together. No job goes to a worker that only
its prefill rate keeps the head from.
"""

from collections.abc import Iterable, Iterator

from inferry.scheduling.placement.reservation import worker_to_reserve
from inferry.scheduling.placement.worker_groups import least_loaded_of
from inferry.scheduling.queues.lane_queue import RouteQueue
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.queues.queued_job import BlockedHead, QueuedJob
from inferry.scheduling.worker_state import WorkerState

_LOOKAHEAD = 3


def backfill_candidates(
    queue: RouteQueue, head: QueuedJob, blocked: BlockedHead, workers: Iterable[WorkerState]
) -> Iterator[tuple[QueuedJob, WorkerState]]:
    """Jobs that may overtake the head, each with one of the workers."""
    route, fill = queue.route, queue.rules.fill
    budget_tokens = QUANTUM_TOKENS * len(route.workers) - blocked.backfilled_tokens
    if len(route.workers) < 2 or budget_tokens <= 0 or queue.size == 1 or route.is_full(1, fill):
        return
    reserved_worker = worker_to_reserve(head, blocked, route, fill)
    open_workers = [
        worker
        for worker in workers
        if worker is not reserved_worker
        and worker.accepts_any(queue.min_kv_tokens, fill)
        and route.has(worker)
        and not worker.is_only_rate_limited(head, fill)
    ]
    for entry in queue.behind(head, _LOOKAHEAD) if open_workers else ():
        if entry.kv_tokens <= budget_tokens:
            worker = least_loaded_of(open_workers, entry, fill)
            if worker is not None:
                blocked.backfilled_tokens += entry.kv_tokens
                yield entry, worker
