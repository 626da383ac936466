"""When a job stops waiting for company. Holding never overrides room: what is released still waits for that.

`adaptive` holds only where that pays. In front of workers that batch continuously it never does: whoever comes later
joins what runs, and mostly finds in the cache what an earlier sibling computed. A padded pass can be joined by nobody,
so while all workers are in one, company costs nothing; before an idle worker it costs the wait of those who are held,
and saves nearly a pass to everybody who comes in time.
"""

from math import inf

from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import ReleaseReason
from inferry.scheduling.company import Passes
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.placing.routes import Route

PART_OF_PASS = 0.25
"""How much of a pass an idle worker is kept waiting at most: one job that comes meanwhile gains three times that."""
ENOUGH_COMPANY = 0.75
"""How many jobs must be expected in that time: one that nearly always comes is enough."""


def held_until(queue: Queue, passes: Passes, now: float) -> float | None:
    """The latest moment to which a job that comes now may be held, as far as its queue is concerned; None: not at all.

    Called once for every job that comes, since that is also how it is learned who follows whom.
    """
    line = queue.line
    if line.window == "off" or line.coalesce_s <= 0:
        return None
    if line.window == "fixed":
        return inf
    if not queue.route.all_pad:
        return None
    company = queue.company
    follows = company.came(now)
    if _all_busy(queue.route):
        return inf
    if not follows:
        pass_s = passes.shortest_s(queue.route.workers)
        company.watch(now + (line.coalesce_s if pass_s is None else min(line.coalesce_s, PART_OF_PASS * pass_s)))
    return company.watch_until if company.expected >= ENOUGH_COMPANY else None


def goes_on(queue: Queue) -> bool:
    """Whether jobs that are held go on being held when workers have changed. Before an idle one they go at once."""
    return queue.line.window == "fixed" or (queue.route.all_pad and _all_busy(queue.route))


def _all_busy(route: Route) -> bool:
    """Whether every worker is in a padded pass that nobody can join."""
    return all(worker.sequences > 0 for worker in route.workers)


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
