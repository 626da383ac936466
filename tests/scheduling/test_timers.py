"""The timer heap: the next due timer, with dropped ones in between."""

import itertools

from inferry.scheduling.lane_rules import LaneRules
from inferry.scheduling.queues.fair_share import LaneAccounts
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.queues.timers import TimerHeap
from support.builders import a_job, a_policy

_numbers = itertools.count()


def an_entry() -> QueuedJob:
    job = a_job()
    run = LaneAccounts().open_run(job.tenant, job.run_id)
    return QueuedJob(job, next(_numbers), LaneRules(job.lane, a_policy()), (0, job.route), run)


def test_timers_fire_in_order_of_time() -> None:
    timers, soon, later = TimerHeap(), an_entry(), an_entry()
    timers.put(later, 2.0)
    timers.put(soon, 1.0)
    assert timers.pop(0.5) is None
    assert timers.pop(2.0) is soon
    assert timers.pop(2.0) is later
    assert timers.next() is None


def test_a_new_timer_replaces_the_old() -> None:
    timers, entry = TimerHeap(), an_entry()
    timers.put(entry, 1.0)
    timers.put(entry, 3.0)
    assert timers.next() == 3.0
    assert timers.pop(2.0) is None


def test_dropped_timers_are_compacted() -> None:
    timers, remaining = TimerHeap(), an_entry()
    timers.put(remaining, 1e9)
    for n in range(10_000):
        entry = an_entry()
        timers.put(entry, float(n))
        timers.drop(entry)
    assert len(timers) == 1
    assert len(timers.heap) < 200
    assert timers.next() == 1e9
