"""Output lengths as a histogram with log-spaced buckets and decaying weights.

Four buckets per octave give every quantile within 19 %. An observation costs one addition. Decay is a weight that grows
with every observation. Truncated outputs are counted apart, as lower bounds. The P² algorithm has neither decay nor
lower bounds, and its five markers adapt slowly when a template changes.
"""

from array import array
from math import exp, log, log2
from typing import Final

from inferry.prediction.values import Spread

EXACT_TOKENS: Final = 8
"""Lengths up to this have one bucket each: short outputs, such as labels, often have exactly one length."""
PER_OCTAVE: Final = 4
MAX_TOKENS: Final = 2**20
BUCKET_COUNT: Final = EXACT_TOKENS + PER_OCTAVE * 17
MEMORY_OBSERVATIONS: Final = 200
"""An observation has half its weight after 0.7 times this many further observations."""

_WEIGHT_GROWTH = 1 / (1 - 1 / MEMORY_OBSERVATIONS)
_RESCALE_ABOVE: Final = 1e100
_LOG2_EXACT = log2(EXACT_TOKENS)


def bucket_of(tokens: int) -> int:
    if tokens <= EXACT_TOKENS:
        return tokens - 1 if tokens > 0 else 0
    if tokens >= MAX_TOKENS:
        return BUCKET_COUNT - 1
    return EXACT_TOKENS + int((log2(tokens) - _LOG2_EXACT) * PER_OCTAVE)


def _bounds(bucket: int) -> tuple[float, float]:
    if bucket < EXACT_TOKENS:
        return float(bucket + 1), float(bucket + 1)
    return float(EXACT_TOKENS * 2 ** ((bucket - EXACT_TOKENS) / PER_OCTAVE)), float(
        EXACT_TOKENS * 2 ** ((bucket - EXACT_TOKENS + 1) / PER_OCTAVE)
    )


_LOWER: Final = [_bounds(bucket)[0] for bucket in range(BUCKET_COUNT)]
_UPPER: Final = [_bounds(bucket)[1] for bucket in range(BUCKET_COUNT)]
_MIDDLE: Final = [(low * high) ** 0.5 for low, high in zip(_LOWER, _UPPER, strict=True)]


class LengthSketch:
    """Output lengths of one key. The spread is computed on demand and cached."""

    __slots__ = ("_completed", "_refresh_at_count", "_spread", "_truncated", "_weight", "count")

    def __init__(self) -> None:
        self.count = 0
        self._completed = array("d", bytes(8 * BUCKET_COUNT))
        self._truncated: array[float] | None = None
        self._weight = 1.0
        self._spread: Spread | None = None
        self._refresh_at_count = 0

    def add(self, bucket: int, truncated: bool) -> None:
        """Count an output. A `truncated` one was stopped by its limit: its length is a lower bound."""
        weight = self._weight
        if truncated:
            if self._truncated is None:
                self._truncated = array("d", bytes(8 * BUCKET_COUNT))
            self._truncated[bucket] += weight
        else:
            self._completed[bucket] += weight
        self.count += 1
        self._weight = weight * _WEIGHT_GROWTH
        if weight > _RESCALE_ABOVE:
            self._rescale()

    @property
    def evidence(self) -> int:
        """The number of observations that have weight."""
        return min(self.count, MEMORY_OBSERVATIONS)

    def spread(self) -> Spread | None:
        """The spread; None before the first observation. It is renewed when a sixteenth of the evidence is new."""
        if not self.count:
            return None
        if self._spread is None or self.count >= self._refresh_at_count:
            self._spread = self._compute()
            self._refresh_at_count = self.count + max(1, self.evidence // 16)
        return self._spread

    def _compute(self) -> Spread:
        """The Kaplan-Meier estimate: the weight of a truncated output is distributed over the longer outputs.

        Weight without a longer output is placed at twice the longest length.
        """
        seen, truncated = self._completed, self._truncated
        at_risk = sum(seen, 0.0) + (sum(truncated, 0.0) if truncated is not None else 0.0)
        if truncated is None:
            return self._compute_untruncated(at_risk)
        surviving, mean, longest = 1.0, 0.0, 0
        low = high = 0.0
        for bucket, weight in enumerate(seen):
            truncated_weight = truncated[bucket]
            if weight <= 0.0 and truncated_weight <= 0.0:
                continue
            longest = bucket
            if weight > 0.0 and at_risk > 0.0:
                ended = surviving * min(1.0, weight / at_risk)
                mean += ended * _MIDDLE[bucket]
                surviving -= ended
                low = low or (_LOWER[bucket] if surviving <= 0.9 else 0.0)
                high = high or (_UPPER[bucket] if surviving <= 0.1 else 0.0)
            at_risk -= weight + truncated_weight
        beyond = 2 * _UPPER[longest]
        mean += surviving * beyond
        return Spread(log(low or _LOWER[longest]), log(mean), log(high or beyond))

    def _compute_untruncated(self, total: float) -> Spread:
        passed, mean, low, high = 0.0, 0.0, 0.0, 0.0
        for bucket, weight in enumerate(self._completed):
            if weight > 0.0:
                passed += weight
                mean += weight * _MIDDLE[bucket]
                low = low or (_LOWER[bucket] if passed >= 0.1 * total else 0.0)
                high = high or (_UPPER[bucket] if passed >= 0.9 * total * (1 - 1e-12) else 0.0)
        return Spread(log(low), log(mean / total), log(high))

    def _rescale(self) -> None:
        # Only the ratios of weights matter.
        scale = 1 / self._weight
        self._completed = array("d", [weight * scale for weight in self._completed])
        if self._truncated is not None:
            self._truncated = array("d", [weight * scale for weight in self._truncated])
        self._weight = 1.0


def tokens_of(logarithm: float) -> int:
    """The length with this logarithm, at least one token."""
    return max(1, round(exp(min(logarithm, 14.0))))
