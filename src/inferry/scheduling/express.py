"""The short way for a job that meets nobody.

The law: while no other job is ready and nobody was promised room, there is no order to keep, no turn to give, no
company to take along, nobody to pass and nobody to stop. All that is left to decide is where, and that is decided as
for any other job. So a job that finds room this way gets the very plan that a walk would have given it; one that does
not is put into its queue, and the walk comes to the same end.
"""

from inferry.scheduling.due import Agenda
from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.place import Placement
from inferry.scheduling.tickets import PLANNED, Ticket

# A walk that never was: nobody waits, so nobody keeps a worker from anybody.
_NO_WALK = -2


def send_alone(ticket: Ticket, placement: Placement, agenda: Agenda, now: float) -> WorkerState | None:
    """Send the only job there is to the best worker that takes it, if one does."""
    queue = ticket.queue
    line = queue.line
    worker = placement.pick(queue.route, ticket, _NO_WALK, line.fill)
    if worker is None:
        return None
    worker.take(ticket)
    ticket.worker = worker
    ticket.stage = PLANNED
    line.leaves(ticket)
    line.drain.departed += 1
    line.pays(ticket.prefill_tokens)
    if ticket.due is not None:
        agenda.drop(ticket)
    tokens = ticket.charged = ticket.prefill_tokens
    ticket.run.goes_alone(tokens)
    if ticket.job.prefix:
        placement.sent(ticket, worker)
    if ticket.watch is not None:
        ticket.watch.went(ticket, now)
    if line.preemptible:
        worker.stoppable[ticket] = None
    return worker
