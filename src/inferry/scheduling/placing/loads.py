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
        if worker.closed_in != walk or ticket.job.lane < worker.closed_from:
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
        worker.closed_from = 0
    return closed


def keep_for_turn(workers: Sequence[WorkerState], ticket: Ticket, walk: int) -> None:
    """Keep one worker, and no more, for a job whose turn it is and that finds no room: the others take its betters.

    Where it lacks nothing but pace it waits for time alone, so the worker is kept only from lanes that are paced as
    well. Else the least loaded is kept from everybody until it has drained enough.
    """
    short_of_pace = [worker for worker in workers if worker.lacks_only_pace(ticket, 1.0)]
    kept = min(short_of_pace or workers, key=load_of, default=None)
    if kept is not None:
        kept.closed_in = walk
        kept.closed_from = kept.best_live + 1 if short_of_pace else 0


def load_of(worker: WorkerState) -> float:
    return worker.weigh() if worker.load is None else worker.load
