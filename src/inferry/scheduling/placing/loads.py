"""The least loaded worker that has room."""

from collections.abc import Sequence

from inferry.scheduling.packing import WorkerState
from inferry.scheduling.tickets import Ticket

_FULL = 1.0


def least_loaded(workers: Sequence[WorkerState], ticket: Ticket, walk: int, fill: float) -> WorkerState | None:
    """The least loaded worker that takes the job into the part `fill` of its room; ties go by name.

    Workers that are closed in this walk take nobody.
    """
    # A worker that is full in any currency is not even worth asking.
    best, least = None, _FULL
    for worker in workers:
        if worker.closed_in != walk:
            load = worker.load
            if load is None:
                load = worker.weigh()
            if load < least and worker.takes(ticket, fill):
                if load == 0.0:
                    return worker
                best, least = worker, load
    return best


def close(workers: Sequence[WorkerState], walk: int) -> list[WorkerState]:
    """Keep the workers for the job that waits for them: nobody behind it may have them in this walk.

    Return those that nobody had closed before.
    """
    closed = []
    for worker in workers:
        if worker.closed_in != walk:
            worker.closed_in = walk
            closed.append(worker)
    return closed
