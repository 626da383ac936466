"""Prefer the worker that has most of the prompt cached, unless it carries more than its part of the load."""

from typing import Final

from inferry.scheduling.placement.scorer import Candidates, Placement, PrefixMatch, Scorer
from inferry.scheduling.queues.queued_job import QueuedJob

PREFIX_TOKENS_PER_SEQUENCE: Final = 512
"""Cached tokens that outweigh one more sequence: a sequence slows its neighbours a little, prefill stops them all."""


class CachedPrefix(Scorer):
    """Of the workers with the longest cached prefix, the latest within its part of the load. What is cached raises that
    part, by one sequence for every `PREFIX_TOKENS_PER_SEQUENCE` tokens.
    """

    def place(self, entry: QueuedJob, match: PrefixMatch | None, candidates: Candidates) -> Placement | None:
        group = candidates.route.tiers[0]
        if match is None or not candidates.is_choice or group.closed_in_walk == candidates.walk:
            return None
        job, tokens = entry.job, match.prefill_tokens
        extra_sequences = job.footprint.prompt.expected * match.slices / (len(job.prefix) * PREFIX_TOKENS_PER_SEQUENCE)
        max_sequences = group.fair_load() + extra_sequences
        for worker in match.workers:
            if worker.sequences < max_sequences and candidates.accepts(worker, group, entry, tokens):
                return Placement(worker, tokens)
        return None


class CachedPrefixAtAnyLoad(Scorer):
    """Rather than leave a job in the queue, send it where part of its prompt is cached and the rest fits."""

    def place(self, entry: QueuedJob, match: PrefixMatch | None, candidates: Candidates) -> Placement | None:
        if match is None or match.prefill_tokens >= entry.prefill_tokens:
            return None
        tokens = match.prefill_tokens
        for worker in match.workers:
            for group in candidates.route.tiers:
                if group.closed_in_walk != candidates.walk and candidates.accepts(worker, group, entry, tokens):
                    return Placement(worker, tokens)
        return None
