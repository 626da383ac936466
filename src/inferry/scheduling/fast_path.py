"""The short way for a job that meets nobody.

The law: while no other job is ready and nobody was promised room, there is no order to keep, no turn to give, no
company to take along, nobody to pass and nobody to stop. All that is left to decide is where, and that is decided as
for any other job. So a job that finds room this way gets the very plan that a walk would have given it; one that does
not is put into its queue, and the walk comes to the same end.
"""

from inferry.scheduling.batching.packing import WorkerState
from inferry.scheduling.placement.scorers import Placement
from inferry.scheduling.queues.queued_job import PLANNED, QueuedJob
from inferry.scheduling.queues.timers import TimerHeap

# A walk that never was: nobody waits, so nobody keeps a worker from anybody.
_NO_WALK = -2


def send_uncontended(entry: QueuedJob, placement: Placement, timers: TimerHeap, now: float) -> WorkerState | None:
    """Send the only job there is to the best worker that takes it, if one does."""
    queue = entry.queue
    lane_queue = queue.lane_queue
    worker = placement.pick(queue.route, entry, _NO_WALK, lane_queue.fill)
    if worker is None:
        return None
    worker.admit(entry)
    entry.worker = worker
    entry.state = PLANNED
    lane_queue.remove_entry(entry)
    lane_queue.drain.departures += 1
    lane_queue.spend_credit(entry.prefill_tokens)
    if entry.due is not None:
        timers.drop(entry)
    tokens = entry.charged_tokens = entry.prefill_tokens
    entry.run.serve_uncontended(tokens)
    if entry.job.prefix:
        placement.sent(entry, worker)
    if entry.sibling_window is not None:
        entry.sibling_window.sent(entry, now)
    if lane_queue.preemptible:
        worker.preemption_candidates[entry] = None
    return worker
