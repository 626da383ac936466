"""Engine flags that can be inferred from probes."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from inferry.sim.costs import EngineFlags
from inferry.sim.observations import Flag, Observation
from inferry.sim.regression import injections

HIT_RATIO = 0.8
CHUNK_FRACTION = 0.2


def infer_missing_flags(observations: Sequence[Observation], reported: dict[str, Flag]) -> dict[str, Flag]:
    """Flags that are not given are inferred from the observations where possible."""
    flags = dict(reported)
    for name, infer in (("max_num_batched_tokens", infer_chunk), ("max_num_seqs", infer_sequences)):
        if flags[name].source == "assumed":
            value = infer(observations)
            if value is not None:
                flags[name] = Flag(value, "inferred")
    return flags


def infer_sequences(observations: Sequence[Observation]) -> int | None:
    """Maximum running sequences: the number after which the rest of a burst waited, if two probes agree."""
    started_together: Counter[int] = Counter()
    for one in observations:
        if one.kind == "decode":
            first_end = min(call.ended_s for call in one.calls)
            concurrent = sum(call.heard_s[0] < first_end for call in one.calls)
            if concurrent < len(one.calls):
                started_together[concurrent] += 1
    agreed = [concurrent for concurrent, times in started_together.items() if times > 1]
    return max(agreed) if agreed else None


def infer_chunk(observations: Sequence[Observation]) -> int | None:
    """Maximum tokens per step: the longest prompt over the number of steps that it made longer."""
    best: tuple[int, int, int] | None = None
    for one in observations:
        for injected, batch, steady_s in injections(one):
            counts = []
            for call in batch:
                itls = [b - a for a, b in pairwise(call.heard_s) if b > injected.sent_s and a < injected.heard_s[0]]
                # Later chunks attend to more context; remainders and server delays are shorter than a chunk.
                long_s = max(1.6 * steady_s, CHUNK_FRACTION * max(itls, default=0.0))
                counts.append(sum(itl > long_s for itl in itls))
            if counts and (best is None or injected.prompt_tokens > best[0]):
                best = (injected.prompt_tokens, round(statistics.median(counts)), len(batch))
    if best is None or best[1] < 2:
        return None
    tokens, chunks, batch_size = best
    estimate, least, most = (tokens / parts + batch_size for parts in (chunks, chunks + 1, chunks - 1))
    powers = [1 << power for power in range(4, 18) if least < 1 << power < most]
    return min(powers, key=lambda power: abs(math.log(power / estimate)), default=round(estimate))


def engine_flags(observations: Sequence[Observation], known: dict[str, Flag]) -> EngineFlags:
    """Consistent flags under which the observations are possible."""
    calls = [call for one in observations for call in one.calls]
    block = known["block_tokens"].value
    largest = max(call.prompt_tokens + call.output_tokens for call in calls)
    sequences = known["max_num_seqs"].value
    return EngineFlags(
        max_num_seqs=sequences,
        max_num_batched_tokens=max(known["max_num_batched_tokens"].value, sequences),
        kv_tokens=max(known["kv_tokens"].value, (largest // block + 1) * block),
        block_tokens=block,
        prefix_caching=_has_prefix_cache(observations),
    )


def _has_prefix_cache(observations: Sequence[Observation]) -> bool:
    """Whether a repeated prompt was answered much faster; True if no probe repeated one."""
    ratios = []
    for one in observations:
        if one.kind == "hit":
            if any(call.cached_tokens for call in one.calls[1:]):
                return True
            ratios.append(statistics.fmean(call.first_s for call in one.calls[1:]) / one.calls[0].first_s)
    return not ratios or statistics.median(ratios) < HIT_RATIO
