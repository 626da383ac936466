"""Scorers in order: the longest warm prefix, then the session's or the prefix's own worker, then the least loaded.

Affinity only ranks workers that have room now, so it delays nobody. What of a prompt is warm on the worker it goes to
is not counted as prefill. Affinity never gives a worker more than its part of the sequences, slack included, but for
prefill that is saved: one sequence more for every so many tokens that are warm there.
"""

from collections.abc import Collection, Sequence

from inferry.scheduling.batching.packing import WorkerState
from inferry.scheduling.placement.prefix_index import PrefixIndex
from inferry.scheduling.placement.route_filter import RouteFilter
from inferry.scheduling.placement.worker_groups import WorkerGroup
from inferry.scheduling.queues.queued_job import QueuedJob

PREFIX_TOKENS_PER_SEQUENCE = 512
"""One more sequence slows its neighbours a little for as long as it runs; to compute this much again stops them all."""


class Placement:
    """Picks workers, and remembers which prefixes went where."""

    __slots__ = ("_prefix_index",)

    def __init__(self) -> None:
        self._prefix_index = PrefixIndex()

    def pick(self, route: RouteFilter, entry: QueuedJob, walk: int, fill: float) -> WorkerState | None:
        """The best worker that takes the job now."""
        job = entry.job
        if job.prefix or job.session is not None:
            return None if route.is_full(entry.kv_tokens, fill) else self._pick_by_affinity(route, entry, walk, fill)
        for tier in route.tiers:
            if tier.closed_in_walk != walk:
                worker = tier.least_loaded(entry, walk, fill)
                if worker is not None:
                    return worker
        return None

    def pick_among(
        self, workers: Collection[WorkerState], route: RouteFilter, entry: QueuedJob, walk: int, fill: float
    ) -> WorkerState | None:
        """The worker that `pick` finds when only some have room."""
        job = entry.job
        if len(workers) > 1 and (job.prefix or job.session is not None):
            return (
                None
                if route.is_full(entry.kv_tokens, fill)
                else self._pick_by_affinity(route, entry, walk, fill, workers)
            )
        depth, warm = self._prefix_index.find(job.prefix) if job.prefix else (0, ())
        for tier in route.tiers:
            if tier.closed_in_walk != walk:
                worker = tier.least_loaded_among(workers, entry, walk, fill)
                if worker is not None:
                    if depth and worker in warm:
                        entry.prefill_tokens = _uncached_tokens(entry, depth)
                    return worker
        return _pick_warm(depth, warm, workers, route, entry, walk, fill) if depth else None

    def _pick_by_affinity(
        self,
        route: RouteFilter,
        entry: QueuedJob,
        walk: int,
        fill: float,
        among: Collection[WorkerState] | None = None,
    ) -> WorkerState | None:
        """Where its prefix is warm, where its kind belongs, where there is least to do; of all or of some."""
        job, first = entry.job, route.tiers[0]
        depth, warm = self._prefix_index.find(job.prefix) if job.prefix else (0, ())
        if first.closed_in_walk != walk:
            fair_load = first.fair_load()
            if depth:
                cold = entry.prefill_tokens
                entry.prefill_tokens = _uncached_tokens(entry, depth)
                extra_sequences = job.footprint.prompt.expected * depth / (len(job.prefix) * PREFIX_TOKENS_PER_SEQUENCE)
                worker = _first_below_load(warm, fair_load + extra_sequences, first, entry, walk, fill, among)
                if worker is not None:
                    return worker
                entry.prefill_tokens = cold
            key = job.prefix[0] if job.session is None else f"{job.tenant}\0{job.session}"
            worker = _first_below_load(first.rendezvous.ranking(key), fair_load, first, entry, walk, fill, among)
            if worker is not None:
                return worker
        for tier in route.tiers:
            if tier.closed_in_walk != walk:
                if among is None:
                    worker = tier.least_loaded(entry, walk, fill)
                else:
                    worker = tier.least_loaded_among(among, entry, walk, fill)
                if worker is not None:
                    if depth and worker in warm:
                        entry.prefill_tokens = _uncached_tokens(entry, depth)
                    return worker
        return _pick_warm(depth, warm, among, route, entry, walk, fill) if depth else None

    def can_join(self, entry: QueuedJob, worker: WorkerState, fill: float, max_tokens: int) -> bool:
        """Whether the worker also takes a sibling of a job it has just taken, for so many prompt tokens at most.

        What they share is warm by then.
        """
        depth, warm = self._prefix_index.find(entry.job.prefix)
        cold = entry.prefill_tokens
        if worker in warm:
            entry.prefill_tokens = _uncached_tokens(entry, depth)
        if entry.prefill_tokens <= max_tokens and worker.accepts(entry, fill):
            return True
        entry.prefill_tokens = cold
        return False

    def sent(self, entry: QueuedJob, worker: WorkerState) -> None:
        self._prefix_index.sent(entry.job.prefix, worker)

    def warm_slices(self, entry: QueuedJob) -> int:
        """How many slices of the job's prefix are warm somewhere."""
        return self._prefix_index.find(entry.job.prefix)[0]

    def forget(self, worker: WorkerState) -> None:
        self._prefix_index.forget(worker)


def _first_below_load(
    workers: Sequence[WorkerState],
    fair_load: float,
    worker_group: WorkerGroup,
    entry: QueuedJob,
    walk: int,
    fill: float,
    among: Collection[WorkerState] | None,
) -> WorkerState | None:
    """The first of the workers that takes the job and carries no more than its part."""
    for worker in workers:
        if (
            worker.sequences < fair_load
            and worker in worker_group.index
            and (among is None or worker in among)
            and (worker_group.touched_in_walk != walk or worker_group.is_open(worker, entry, walk))
            and worker.accepts(entry, fill)
        ):
            return worker
    return None


def _pick_warm(
    depth: int,
    warm: Sequence[WorkerState],
    among: Collection[WorkerState] | None,
    route: RouteFilter,
    entry: QueuedJob,
    walk: int,
    fill: float,
) -> WorkerState | None:
    """Rather than wait, a job goes where part of its prompt is warm and the rest fits, however loaded that is."""
    cold = entry.prefill_tokens
    entry.prefill_tokens = _uncached_tokens(entry, depth)
    if entry.prefill_tokens < cold:
        for worker in warm:
            if among is None or worker in among:
                for tier in route.tiers:
                    if (
                        worker in tier.index
                        and tier.closed_in_walk != walk
                        and tier.is_open(worker, entry, walk)
                        and worker.accepts(entry, fill)
                    ):
                        return worker
    entry.prefill_tokens = cold
    return None


def _uncached_tokens(entry: QueuedJob, depth: int) -> int:
    """The prompt tokens still to compute when that many slices of the prefix are warm; never more than was expected.

    Where the footprint knows of something cached that is all there is: it was counted in bytes and corrected by what
    engines report, and slices are not equally long.
    """
    job = entry.job
    if job.footprint.cached.high > 0:
        return entry.prefill_tokens
    prompt = job.footprint.prompt.expected
    tokens = prompt - prompt * depth // len(job.prefix)
    if tokens > entry.prefill_tokens:
        tokens = entry.prefill_tokens
    return tokens if tokens > 0 else 1
