"""How long answers have been: a histogram over log-spaced lengths that forgets.

Why not P²: its five markers cannot forget, cannot say "at least this long", and lose their way when a template changes.
A histogram with a bucket per quarter octave answers every quantile to within 19 %, takes one addition per observation,
forgets by giving each observation a little more weight than the one before, and can hold cut-off answers apart.
"""

from array import array
from math import exp, log, log2

from inferry.admission.values import Spread

EXACT = 8
"""Lengths up to here have a bucket each; short answers (a label, a yes) are often always the same."""
PER_OCTAVE = 4
LARGEST = 2**20
BUCKETS = EXACT + PER_OCTAVE * 17
MEMORY = 200
"""An observation counts for half after about 0.7 times this many others."""

_GROWTH = 1 / (1 - 1 / MEMORY)
_TOO_HEAVY = 1e100
_SMALLEST_BOX = log2(EXACT)


def bucket_of(tokens: int) -> int:
    if tokens <= EXACT:
        return tokens - 1 if tokens > 0 else 0
    if tokens >= LARGEST:
        return BUCKETS - 1
    return EXACT + int((log2(tokens) - _SMALLEST_BOX) * PER_OCTAVE)


def _bounds(bucket: int) -> tuple[float, float]:
    if bucket < EXACT:
        return float(bucket + 1), float(bucket + 1)
    return float(EXACT * 2 ** ((bucket - EXACT) / PER_OCTAVE)), float(EXACT * 2 ** ((bucket - EXACT + 1) / PER_OCTAVE))


_LOWER = [_bounds(bucket)[0] for bucket in range(BUCKETS)]
_UPPER = [_bounds(bucket)[1] for bucket in range(BUCKETS)]
_MIDDLE = [(low * high) ** 0.5 for low, high in zip(_LOWER, _UPPER, strict=True)]


class LengthSketch:
    """Lengths seen under one key. One addition per observation; the spread is computed when asked, and kept a while."""

    __slots__ = ("_cut", "_fresh_until", "_seen", "_spread", "_weight", "count")

    def __init__(self) -> None:
        self.count = 0
        self._seen = array("d", bytes(8 * BUCKETS))
        self._cut: array[float] | None = None
        self._weight = 1.0
        self._spread: Spread | None = None
        self._fresh_until = 0

    def add(self, bucket: int, cut: bool) -> None:
        """Count an answer; `cut` says it was stopped by its limit, so that its own length is at least this."""
        weight = self._weight
        if cut:
            if self._cut is None:
                self._cut = array("d", bytes(8 * BUCKETS))
            self._cut[bucket] += weight
        else:
            self._seen[bucket] += weight
        self.count += 1
        self._weight = weight * _GROWTH
        if weight > _TOO_HEAVY:
            self._lighten()

    @property
    def evidence(self) -> int:
        """How many observations still count."""
        return min(self.count, MEMORY)

    def spread(self) -> Spread | None:
        """None before the first observation. Renewed when a sixteenth of the evidence is new."""
        if not self.count:
            return None
        if self._spread is None or self.count >= self._fresh_until:
            self._spread = self._compute()
            self._fresh_until = self.count + max(1, self.evidence // 16)
        return self._spread

    def _compute(self) -> Spread:
        """The Kaplan-Meier estimate: a cut answer says nothing about lengths beyond its cut, so its weight goes to
        the longer answers seen. What nobody has outlived is put at twice the longest cut."""
        seen, cut = self._seen, self._cut
        at_risk = sum(seen, 0.0) + (sum(cut, 0.0) if cut is not None else 0.0)
        if cut is None:
            return self._compute_uncut(at_risk)
        surviving, mean, longest = 1.0, 0.0, 0
        low = high = 0.0
        for bucket, weight in enumerate(seen):
            left = cut[bucket]
            if weight <= 0.0 and left <= 0.0:
                continue
            longest = bucket
            if weight > 0.0 and at_risk > 0.0:
                gone = surviving * min(1.0, weight / at_risk)
                mean += gone * _MIDDLE[bucket]
                surviving -= gone
                low = low or (_LOWER[bucket] if surviving <= 0.9 else 0.0)
                high = high or (_UPPER[bucket] if surviving <= 0.1 else 0.0)
            at_risk -= weight + left
        beyond = 2 * _UPPER[longest]
        mean += surviving * beyond
        return Spread(log(low or _LOWER[longest]), log(mean), log(high or beyond))

    def _compute_uncut(self, total: float) -> Spread:
        passed, mean, low, high = 0.0, 0.0, 0.0, 0.0
        for bucket, weight in enumerate(self._seen):
            if weight > 0.0:
                passed += weight
                mean += weight * _MIDDLE[bucket]
                low = low or (_LOWER[bucket] if passed >= 0.1 * total else 0.0)
                high = high or (_UPPER[bucket] if passed >= 0.9 * total * (1 - 1e-12) else 0.0)
        return Spread(log(low), log(mean / total), log(high))

    def _lighten(self) -> None:
        # Weights only mean anything relative to each other.
        scale = 1 / self._weight
        self._seen = array("d", [weight * scale for weight in self._seen])
        if self._cut is not None:
            self._cut = array("d", [weight * scale for weight in self._cut])
        self._weight = 1.0


def tokens_of(logarithm: float) -> int:
    """The length whose logarithm this is, at least one token."""
    return max(1, round(exp(min(logarithm, 14.0))))
