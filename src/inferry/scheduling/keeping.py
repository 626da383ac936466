"""Which worker is kept for a job that is first and finds no room.

It can start on one worker only, so one is kept for it, and it stays the same one until the job goes: another choice
with every change would let others have what has drained so far.
"""

from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.fleets import load_of
from inferry.scheduling.tickets import Ticket, Wait


def kept_for(ticket: Ticket, wait: Wait, fill: float) -> WorkerState:
    """The worker that is kept: one that lacks nothing but pace for the job, if there is one, else the least loaded."""
    route, kept = ticket.queue.route, wait.kept
    if kept is None or not route.has(kept):
        if wait.retry_at is not None:  # somewhere it lacked only pace
            short_of_pace = [worker for worker in route.workers if worker.lacks_only_pace(ticket, fill)]
            kept = min(short_of_pace, key=load_of, default=None)
        if kept is None or not route.has(kept):
            kept = min([tier.least() for tier in route.tiers], key=load_of)
        wait.kept = kept
    return kept


def keep_for_turn(ticket: Ticket, wait: Wait, walk: int) -> None:
    """Keep one worker for a job whose turn it is and that finds no room: all others go on taking its betters.

    Where it lacks nothing but pace it waits for time alone, so the worker is kept only from lanes that are paced as
    well. Else it is kept from everybody until it has drained enough.
    """
    worker = kept_for(ticket, wait, 1.0)
    worker.closed_in = walk
    worker.closed_from = worker.best_live + 1 if worker.lacks_only_pace(ticket, 1.0) else 0
    for fleet in worker.fleets:
        fleet.touched_in = walk
