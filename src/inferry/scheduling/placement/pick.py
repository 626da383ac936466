"""Pick a worker: scorers in order over the candidates that the filters left.

A scorer only ranks workers that accept the job now, so preferring one delays no job.
"""

from collections.abc import Sequence

from inferry.scheduling.placement.prefix_index import PrefixIndex
from inferry.scheduling.placement.scorer import Candidates, Placement, PrefixMatch, Scorer
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.worker_state import WorkerState


class Picker:
    """Places jobs, and remembers which prefixes went to which workers."""

    __slots__ = ("_plain_scorers", "_prefix_index", "_scorers")

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._scorers = list(scorers)
        self._plain_scorers = [scorer for scorer in scorers if not scorer.needs_affinity]
        self._prefix_index = PrefixIndex()

    def pick(self, entry: QueuedJob, candidates: Candidates) -> Placement | None:
        """The placement by the first scorer that has one. Changes nothing but the job's `picked_by`."""
        job, route = entry.job, candidates.route
        match = None
        scorers = self._plain_scorers
        if job.prefix or job.session is not None:
            if not route.tiers or (candidates.is_choice and route.is_full(entry.kv_tokens, candidates.fill)):
                return None
            if job.prefix:
                match = self._match(entry)
            scorers = self._scorers
        for scorer in scorers:
            placement = scorer.place(entry, match, candidates)
            if placement is not None:
                entry.picked_by = scorer.name
                return placement if not job.prefix else self._charged(entry, match, placement)
        return None

    def join(self, entry: QueuedJob, worker: WorkerState, fill: float, max_tokens: int) -> Placement | None:
        """A place on the worker that has just accepted a sibling, for `max_tokens` of prefill at most."""
        match = self._match(entry)
        has_prefix = match is not None and worker in match.workers
        tokens = match.prefill_tokens if match is not None and has_prefix else self._prefill_tokens_on(worker, entry)
        return Placement(worker, tokens) if tokens <= max_tokens and worker.accepts(entry, tokens, fill) else None

    def sent(self, entry: QueuedJob, worker: WorkerState) -> None:
        self._prefix_index.sent(entry.job.prefix, worker)

    def cached_slices(self, entry: QueuedJob) -> int:
        """How many slices of the job's prefix are cached on some worker."""
        return self._prefix_index.find(entry.job.prefix)[0]

    def forget(self, worker: WorkerState) -> None:
        self._prefix_index.forget(worker)

    def _charged(self, entry: QueuedJob, match: PrefixMatch | None, placement: Placement) -> Placement:
        """The placement, with the tokens to compute there if the worker has less of the prompt than others have."""
        worker, job = placement.worker, entry.job
        is_handed_over = job.route.role == "decode"
        if job.footprint.cached.high <= 0 or is_handed_over or (match is not None and worker in match.workers):
            return placement
        return Placement(worker, self._prefill_tokens_on(worker, entry))

    def _prefill_tokens_on(self, worker: WorkerState, entry: QueuedJob) -> int:
        """The prompt tokens to compute on a worker that does not have the longest known beginning of the prompt.

        The footprint says what is cached on some worker. The beginnings that a prefix names double in length, so each
        one less that the worker has halves what it has at least.
        """
        footprint, prefix = entry.job.footprint, entry.job.prefix
        if footprint.cached.high <= 0:
            return entry.prefill_tokens
        slices = self._prefix_index.slices_on(prefix, worker)
        prompt, cached = footprint.prompt.expected, 0
        if slices:
            cached = min(footprint.cached.expected, prompt >> (len(prefix) - slices))
        return prompt - cached if prompt > cached else 1

    def _match(self, entry: QueuedJob) -> PrefixMatch | None:
        slices, workers = self._prefix_index.find(entry.job.prefix)
        return PrefixMatch(slices, workers, _uncached_tokens(entry, slices)) if slices else None


def _uncached_tokens(entry: QueuedJob, slices: int) -> int:
    """The prompt tokens to compute where `slices` of the prefix are cached; never more than was expected.

    A footprint that names cached tokens is better: it is corrected by what engines report, and slices differ in length.
    """
    job = entry.job
    if job.footprint.cached.high > 0:
        return entry.prefill_tokens
    prompt = job.footprint.prompt.expected
    tokens = prompt - prompt * slices // len(job.prefix)
    if tokens > entry.prefill_tokens:
        tokens = entry.prefill_tokens
    return tokens if tokens > 0 else 1
