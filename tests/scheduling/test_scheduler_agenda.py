"""The agenda: what is due next, whatever was dropped in between."""

import itertools

from inferry.domain.lanes import Lane
from inferry.scheduling.due import Agenda
from inferry.scheduling.fairness import LaneAccounts
from inferry.scheduling.lanes import Hall, Line
from inferry.scheduling.placing.fleets import Fleets
from inferry.scheduling.placing.routes import Route
from inferry.scheduling.tickets import Ticket
from support.builders import a_job, a_policy

_numbers = itertools.count()


def a_ticket() -> Ticket:
    job = a_job()
    line = Line(Lane.P1, a_policy(), LaneAccounts(), Hall(), lambda ticket: 0)
    queue = line.queue_for(job, Route(job.route, (), Fleets()))
    return line.ticket_for(job, next(_numbers), queue)


def test_tickets_come_in_order_of_time_and_not_before() -> None:
    agenda, soon, later = Agenda(), a_ticket(), a_ticket()
    agenda.put(later, 2.0)
    agenda.put(soon, 1.0)
    assert agenda.pop(0.5) is None
    assert agenda.pop(2.0) is soon
    assert agenda.pop(2.0) is later
    assert agenda.next() is None


def test_a_new_date_replaces_the_old() -> None:
    agenda, ticket = Agenda(), a_ticket()
    agenda.put(ticket, 1.0)
    agenda.put(ticket, 3.0)
    assert agenda.next() == 3.0
    assert agenda.pop(2.0) is None


def test_dropped_dates_do_not_pile_up() -> None:
    agenda, kept = Agenda(), a_ticket()
    agenda.put(kept, 1e9)
    for n in range(10_000):
        ticket = a_ticket()
        agenda.put(ticket, float(n))
        agenda.drop(ticket)
    assert len(agenda) == 1
    assert len(agenda.heap) < 200
    assert agenda.next() == 1e9
