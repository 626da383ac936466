"""Scorers in order: the longest warm prefix, then the session's or the prefix's own worker, then the least loaded.

Affinity only ranks workers that have room now, so it delays nobody.
"""

from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.loads import least_loaded
from inferry.scheduling.placing.routes import Route
from inferry.scheduling.placing.warmth import Warmth
from inferry.scheduling.tickets import Ticket


class Placement:
    """Picks workers, and remembers which prefixes went where."""

    __slots__ = ("_warmth",)

    def __init__(self) -> None:
        self._warmth = Warmth()

    def pick(self, route: Route, ticket: Ticket, walk: int, fill: float) -> WorkerState | None:
        """The best worker that takes the job now. A prefix that is warm there is not counted as prefill."""
        job = ticket.job
        if (job.prefix or job.session is not None) and route.workers:
            worker = self._by_affinity(route, ticket, walk, fill)
            if worker is not None:
                route.circle.sent_one()
                return worker
        for tier in route.tiers:
            worker = least_loaded(tier, ticket, walk, fill)
            if worker is not None:
                return worker
        return None

    def _by_affinity(self, route: Route, ticket: Ticket, walk: int, fill: float) -> WorkerState | None:
        job, circle = ticket.job, route.circle
        fair_load = circle.fair_load(walk)
        if job.prefix:
            depth, warm = self._warmth.find(job.prefix)
            if warm:
                cold = ticket.prefill_tokens
                ticket.prefill_tokens = _discounted(ticket, depth)
                for worker in warm:
                    if (
                        (worker.closed_in != walk or job.lane < worker.closed_from)
                        and worker in circle.members
                        and worker.sequences < fair_load
                        and worker.takes(ticket, fill)
                    ):
                        return worker
                ticket.prefill_tokens = cold
        key = job.prefix[0] if job.session is None else f"{job.tenant}\0{job.session}"
        for worker in circle.nearest(key):
            if (
                (worker.closed_in != walk or job.lane < worker.closed_from)
                and worker.sequences < fair_load
                and worker.takes(ticket, fill)
            ):
                return worker
        return None

    def joins(self, ticket: Ticket, worker: WorkerState, fill: float, at_most: int) -> bool:
        """Whether the worker also takes a sibling of a job it has just taken, for so many prompt tokens at most.

        What they share is warm by then.
        """
        depth, warm = self._warmth.find(ticket.job.prefix)
        cold = ticket.prefill_tokens
        if worker in warm:
            ticket.prefill_tokens = _discounted(ticket, depth)
        if ticket.prefill_tokens <= at_most and worker.takes(ticket, fill):
            return True
        ticket.prefill_tokens = cold
        return False

    def sent(self, ticket: Ticket, worker: WorkerState) -> None:
        self._warmth.sent(ticket.job.prefix, worker)

    def warmth(self, ticket: Ticket) -> int:
        """How many slices of the job's prefix are warm somewhere."""
        return self._warmth.find(ticket.job.prefix)[0]

    def forget(self, worker: WorkerState) -> None:
        self._warmth.forget(worker)


def _discounted(ticket: Ticket, depth: int) -> int:
    """The prompt tokens still to compute when that many slices of the prefix are warm; never more than was expected."""
    job = ticket.job
    prompt = job.footprint.prompt.expected
    return max(1, min(ticket.prefill_tokens, prompt - prompt * depth // len(job.prefix)))
