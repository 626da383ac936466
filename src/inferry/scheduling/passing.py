"""How far a large job that waits may be passed by smaller ones of its own queue.

A head without room closes all its workers, though it can start on one of them only. So one worker is kept for it, the
least loaded, which takes nobody until the head has gone; the others may take a few of those who stand behind it. All
that ever pass a head come to at most a quantum per worker, prompts and expected outputs together: that, and what is in
flight on the worker kept, is the most it waits for.
"""

from collections.abc import Iterator, Sequence

from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.loads import least_loaded, load_of
from inferry.scheduling.quantum import QUANTUM_TOKENS
from inferry.scheduling.tickets import Ticket

_LOOKAHEAD = 4
# A walk that never was: the workers are closed in the present one, by the very head that is passed.
_NO_WALK = -1


def passers(head: Ticket, workers: Sequence[WorkerState]) -> Iterator[tuple[Ticket, WorkerState]]:
    """Who may pass the head, and onto which of the workers that it closed."""
    left = QUANTUM_TOKENS * len(workers) - head.passed
    if len(workers) < 2 or left <= 0 or head.queue.size == 1:
        return
    fill = head.queue.line.fill
    open_workers = [worker for worker in workers if worker.takes_somebody(fill)]
    if not open_workers:
        return
    kept = min(workers, key=load_of)
    open_workers = [worker for worker in open_workers if worker is not kept]
    for ticket in head.queue.behind(head, _LOOKAHEAD):
        if ticket.kv_tokens <= left:
            worker = least_loaded(open_workers, ticket, _NO_WALK, fill)
            if worker is not None:
                head.passed += ticket.kv_tokens
                yield ticket, worker
