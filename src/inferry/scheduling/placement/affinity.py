"""Prefer the worker that the session or the beginning of the prompt hashes to, within its part of the load."""

from inferry.scheduling.placement.scorer import Candidates, Placement, PrefixMatch, Scorer
from inferry.scheduling.queues.queued_job import QueuedJob


class Affinity(Scorer):
    """Equal sessions, or equal first slices, go to equal workers while those are not overloaded."""

    def place(self, entry: QueuedJob, match: PrefixMatch | None, candidates: Candidates) -> Placement | None:
        job = entry.job
        if not candidates.is_choice:
            return None
        if job.session is not None:
            key = f"{job.tenant}\0{job.session}"
        elif job.prefix:
            key = job.prefix[0]
        else:
            return None
        group = candidates.route.tiers[0]
        if group.closed_in_walk == candidates.walk:
            return None
        max_sequences, tokens = group.fair_load(), entry.prefill_tokens
        for worker in group.rendezvous.ranking(key):
            if worker.sequences < max_sequences and candidates.accepts(worker, group, entry, tokens):
                return Placement(worker, tokens)
        return None
