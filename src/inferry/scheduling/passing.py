"""How far a large job that waits may be passed by smaller ones of its own queue.

A head without room closes all its workers, though it can start on one of them only. So one worker is kept for it, which
takes nobody until the head has gone; the others may take a few of those who stand behind it, where room has come up
that the head cannot use. All that ever pass a head come to at most a quantum per worker, prompts and expected outputs
together: that, and what is in flight on the worker kept, is the most it waits for. Nobody passes onto a worker that
the head could have but for the pace.
"""

from collections.abc import Iterable, Iterator

from inferry.scheduling.keeping import kept_for
from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.fleets import least_loaded_of
from inferry.scheduling.quantum import QUANTUM_TOKENS
from inferry.scheduling.tickets import Ticket, Wait

_LOOKAHEAD = 3


def passers(head: Ticket, wait: Wait, workers: Iterable[WorkerState]) -> Iterator[tuple[Ticket, WorkerState]]:
    """Who may pass the head, and onto which of the workers."""
    queue = head.queue
    route, fill = queue.route, queue.line.fill
    left = QUANTUM_TOKENS * len(route.workers) - wait.passed
    if len(route.workers) < 2 or left <= 0 or queue.size == 1 or route.is_full(1, fill):
        return
    kept = kept_for(head, wait, fill)
    open_workers = [
        worker
        for worker in workers
        if worker is not kept
        and worker.takes_somebody(queue.least_kv_tokens, fill)
        and route.has(worker)
        and not worker.lacks_only_pace(head, fill)
    ]
    for ticket in queue.behind(head, _LOOKAHEAD) if open_workers else ():
        if ticket.kv_tokens <= left:
            worker = least_loaded_of(open_workers, ticket, fill)
            if worker is not None:
                wait.passed += ticket.kv_tokens
                yield ticket, worker
