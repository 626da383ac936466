"""How far a large job that waits may be passed by smaller ones of its own queue.

A head without room closes all its workers, though it can start on one of them only. So one worker is kept for it, which
takes nobody until the head has gone; the others may take a few of those who stand behind it, where room has come up
that the head cannot use. All that ever pass a head come to at most a quantum per worker, prompts and expected outputs
together: that, and what is in flight on the worker kept, is the most it waits for. Nobody passes onto a worker that
the head could have but for the pace.
"""

from collections.abc import Iterable, Iterator

from inferry.scheduling.batching.packing import WorkerState
from inferry.scheduling.placement.reservation import worker_to_reserve
from inferry.scheduling.placement.worker_groups import least_loaded_of
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.queues.queued_job import BlockedHead, QueuedJob

_LOOKAHEAD = 3


def backfill_candidates(
    head: QueuedJob, blocked: BlockedHead, workers: Iterable[WorkerState]
) -> Iterator[tuple[QueuedJob, WorkerState]]:
    """Who may pass the head, and onto which of the workers."""
    queue = head.queue
    route, fill = queue.route, queue.lane_queue.fill
    budget_tokens = QUANTUM_TOKENS * len(route.workers) - blocked.backfilled_tokens
    if len(route.workers) < 2 or budget_tokens <= 0 or queue.size == 1 or route.is_full(1, fill):
        return
    reserved_worker = worker_to_reserve(head, blocked, fill)
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
