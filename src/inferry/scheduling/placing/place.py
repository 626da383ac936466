"""Scorers in order: the longest warm prefix, then the session's or the prefix's own worker, then the least loaded.

Affinity only ranks workers that have room now, so it delays nobody. What of a prompt is warm on the worker it goes to
is not counted as prefill. Affinity never gives a worker more than its part of the sequences, slack included, but for
prefill that is saved: one sequence more for every so many tokens that are warm there.
"""

from collections.abc import Collection, Sequence

from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.fleets import Fleet
from inferry.scheduling.placing.routes import Route
from inferry.scheduling.placing.warmth import Warmth
from inferry.scheduling.tickets import Ticket

TOKENS_WORTH_A_SEQUENCE = 512
"""One more sequence slows its neighbours a little for as long as it runs; to compute this much again stops them all."""


class Placement:
    """Picks workers, and remembers which prefixes went where."""

    __slots__ = ("_warmth",)

    def __init__(self) -> None:
        self._warmth = Warmth()

    def pick(self, route: Route, ticket: Ticket, walk: int, fill: float) -> WorkerState | None:
        """The best worker that takes the job now."""
        job = ticket.job
        if job.prefix or job.session is not None:
            return None if route.is_full(ticket.kv_tokens, fill) else self._by_ties(route, ticket, walk, fill)
        for tier in route.tiers:
            if tier.closed_in != walk:
                worker = tier.least_loaded(ticket, walk, fill)
                if worker is not None:
                    return worker
        return None

    def pick_among(
        self, workers: Collection[WorkerState], route: Route, ticket: Ticket, walk: int, fill: float
    ) -> WorkerState | None:
        """The worker that `pick` finds when only some have room."""
        job = ticket.job
        if len(workers) > 1 and (job.prefix or job.session is not None):
            return None if route.is_full(ticket.kv_tokens, fill) else self._by_ties(route, ticket, walk, fill, workers)
        depth, warm = self._warmth.find(job.prefix) if job.prefix else (0, ())
        for tier in route.tiers:
            if tier.closed_in != walk:
                worker = tier.least_loaded_among(workers, ticket, walk, fill)
                if worker is not None:
                    if depth and worker in warm:
                        ticket.prefill_tokens = _discounted(ticket, depth)
                    return worker
        return _where_it_is_warm(depth, warm, workers, route, ticket, walk, fill) if depth else None

    def _by_ties(
        self,
        route: Route,
        ticket: Ticket,
        walk: int,
        fill: float,
        among: Collection[WorkerState] | None = None,
    ) -> WorkerState | None:
        """Where its prefix is warm, where its kind belongs, where there is least to do; of all or of some."""
        job, first = ticket.job, route.tiers[0]
        depth, warm = self._warmth.find(job.prefix) if job.prefix else (0, ())
        if first.closed_in != walk:
            fair_load = first.fair_load()
            if depth:
                cold = ticket.prefill_tokens
                ticket.prefill_tokens = _discounted(ticket, depth)
                worth = job.footprint.prompt.expected * depth / (len(job.prefix) * TOKENS_WORTH_A_SEQUENCE)
                worker = _lightly_loaded(warm, fair_load + worth, first, ticket, walk, fill, among)
                if worker is not None:
                    return worker
                ticket.prefill_tokens = cold
            key = job.prefix[0] if job.session is None else f"{job.tenant}\0{job.session}"
            worker = _lightly_loaded(first.circle.nearest(key), fair_load, first, ticket, walk, fill, among)
            if worker is not None:
                return worker
        for tier in route.tiers:
            if tier.closed_in != walk:
                if among is None:
                    worker = tier.least_loaded(ticket, walk, fill)
                else:
                    worker = tier.least_loaded_among(among, ticket, walk, fill)
                if worker is not None:
                    if depth and worker in warm:
                        ticket.prefill_tokens = _discounted(ticket, depth)
                    return worker
        return _where_it_is_warm(depth, warm, among, route, ticket, walk, fill) if depth else None

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


def _lightly_loaded(
    workers: Sequence[WorkerState],
    fair_load: float,
    fleet: Fleet,
    ticket: Ticket,
    walk: int,
    fill: float,
    among: Collection[WorkerState] | None,
) -> WorkerState | None:
    """The first of the workers that takes the job and carries no more than its part."""
    for worker in workers:
        if (
            worker.sequences < fair_load
            and worker in fleet.index
            and (among is None or worker in among)
            and (fleet.touched_in != walk or fleet.is_open(worker, ticket, walk))
            and worker.takes(ticket, fill)
        ):
            return worker
    return None


def _where_it_is_warm(
    depth: int,
    warm: Sequence[WorkerState],
    among: Collection[WorkerState] | None,
    route: Route,
    ticket: Ticket,
    walk: int,
    fill: float,
) -> WorkerState | None:
    """Rather than wait, a job goes where part of its prompt is warm and the rest fits, however loaded that is."""
    cold = ticket.prefill_tokens
    ticket.prefill_tokens = _discounted(ticket, depth)
    if ticket.prefill_tokens < cold:
        for worker in warm:
            if among is None or worker in among:
                for tier in route.tiers:
                    if (
                        worker in tier.index
                        and tier.closed_in != walk
                        and tier.is_open(worker, ticket, walk)
                        and worker.takes(ticket, fill)
                    ):
                        return worker
    ticket.prefill_tokens = cold
    return None


def _discounted(ticket: Ticket, depth: int) -> int:
    """The prompt tokens still to compute when that many slices of the prefix are warm; never more than was expected.

    Where the footprint knows of something cached that is all there is: it was counted in bytes and corrected by what
    engines report, and slices are not equally long.
    """
    job = ticket.job
    if job.footprint.cached.high > 0:
        return ticket.prefill_tokens
    prompt = job.footprint.prompt.expected
    tokens = prompt - prompt * depth // len(job.prefix)
    if tokens > ticket.prefill_tokens:
        tokens = ticket.prefill_tokens
    return tokens if tokens > 0 else 1
