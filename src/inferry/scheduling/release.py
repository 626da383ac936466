"""When a job stops waiting for company. Holding never overrides room: what is released still waits for that.

`adaptive` holds only where that pays. Whoever comes later to workers that batch continuously joins what runs, and
mostly finds in the cache what an earlier sibling computed; `siblings` says when that is not enough. A padded pass can
be joined by nobody, so while all workers are in one, company costs nothing; before an idle worker it costs the wait of
those who are held, and saves nearly a pass to everybody who comes in time.
"""

from math import inf

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.scheduling.company import Passes
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.tickets import Ticket

PART_OF_PASS = 0.25
"""How much of a pass an idle worker is kept waiting at most: one job that comes meanwhile gains three times that."""
ENOUGH_COMPANY = 0.75
"""How many jobs must be expected in that time: one that nearly always comes is enough."""


def held_until(ticket: Ticket, passes: Passes, now: float) -> float | None:
    """The latest moment to which a job that comes now may be held, as far as its queue is concerned; None: not at all.

    Called once for every job that comes, since that is also how it is learned who follows whom.
    """
    queue = ticket.queue
    line, route = queue.line, queue.route
    if line.window != "fixed" and not ticket.job.prefix and not route.some_pad:
        return None  # as for most: it has no siblings, and whoever comes later joins what runs
    if line.window == "off" or line.coalesce_s <= 0:
        return None
    if line.window == "fixed":
        return inf
    if route.all_pad:
        return _held_before_passes(queue, passes, now)
    if not ticket.job.prefix or route.some_pad or len(route.workers) < 2 or route.has_idle():
        return None
    return queue.watches.came(ticket, now)


def _held_before_passes(queue: Queue, passes: Passes, now: float) -> float | None:
    company, line = queue.company, queue.line
    follows = company.came(now)
    if not queue.route.has_idle():
        return inf
    if not follows:
        pass_s = passes.shortest_s(queue.route.workers)
        company.watch(now + (line.coalesce_s if pass_s is None else min(line.coalesce_s, PART_OF_PASS * pass_s)))
    return company.watch_until if company.expected >= ENOUGH_COMPANY else None


def goes_on(queue: Queue) -> bool:
    """Whether jobs that are held go on being held when workers have changed. Before an idle one they go at once."""
    route = queue.route
    return queue.line.window == "fixed" or (route.all_pad is route.some_pad and not route.has_idle())


def hold_until(job: InferenceJob, line: Line, at_most: float = inf) -> tuple[float, ReleaseReason]:
    """The latest moment the job is held to, and why not longer. Counted from arrival, however late it is offered."""
    arrived = job.arrived_at
    until, reason = min(arrived + line.coalesce_s, at_most), ReleaseReason.WINDOW
    if job.deadline is not None and (halfway := arrived + (job.deadline - arrived) / 2) < until:
        until, reason = halfway, ReleaseReason.DEADLINE
    if (patience := arrived + min(job.max_wait_s, line.max_wait_s)) < until:
        until, reason = patience, ReleaseReason.MAX_WAIT
    return until, reason


def is_full(queue: Queue) -> bool:
    """Whether the jobs held together are all that one plan or one worker can take."""
    if len(queue.held) >= queue.line.policy.max_batch:
        return True
    workers, fill = queue.route.workers, queue.line.fill
    return bool(workers) and not any(
        len(queue.held) < worker.sequence_limit * fill
        and queue.held_prefill_tokens < worker.prefill_limit * fill
        and queue.held_kv_tokens < worker.kv_limit * fill
        for worker in workers
    )
