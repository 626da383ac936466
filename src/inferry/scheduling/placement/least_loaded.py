"""Prefer the least loaded worker, of the first worker group of the lane that has one."""

from inferry.scheduling.placement.scorer import Candidates, Placement, PrefixMatch, Scorer
from inferry.scheduling.queues.queued_job import QueuedJob


class LeastLoaded(Scorer):
    """Load is the part in use of the currency that is used most; ties go by name."""

    def place(self, entry: QueuedJob, match: PrefixMatch | None, candidates: Candidates) -> Placement | None:
        among, walk, fill = candidates.among, candidates.walk, candidates.fill
        for group in candidates.route.tiers:
            if group.closed_in_walk != walk:
                if among is None:
                    worker = group.least_loaded(entry, walk, fill)
                else:
                    worker = group.least_loaded_among(among, entry, walk, fill)
                if worker is not None:
                    if match is not None and worker in match.workers:
                        return Placement(worker, match.prefill_tokens)
                    return Placement(worker, entry.prefill_tokens)
        return None
