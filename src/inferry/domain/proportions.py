"""Intervals for shares of calls, and the threshold that promises a share. Pure."""

from collections.abc import Sequence
from math import ceil, exp, lgamma, log, sqrt
from typing import NamedTuple

Z_95 = 1.959963984540054
"""Two-sided 95 %."""
CANDIDATES = 20
"""Thresholds that are tried, by the share of calls that they accept."""


def wilson(hits: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share; (0, 1) without data."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = hits / total, z * z
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = z / (1 + z2 / total) * sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def exact_lower(hits: int, total: int, confidence: float = 0.95) -> float:
    """Clopper and Pearson's one-sided lower bound of a share: too high in at most `1 - confidence` of samples."""
    if hits == 0 or total == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        if _at_least(hits, total, share) < 1 - confidence:
            low = share
        else:
            high = share
    return low


class Threshold(NamedTuple):
    """A threshold, what it promises, and what it was chosen from: pairs at or above it and those that agreed."""

    score: float
    lower_bound: float
    accepted: int
    agreed: int
    total: int


def choose_threshold(
    pairs: Sequence[tuple[float, bool]], agreement: float, confidence: float = 0.95
) -> Threshold | None:
    """The lowest score at which answers agree at least as often as promised; None where no score can promise it.

    Candidates accept 5 %, 10 %, … of the pairs. Each bound has the confidence that makes all of them hold at once
    (Bonferroni), so the chosen threshold breaks its promise in at most `1 - confidence` of samples. The best of many
    candidates would otherwise look better than it is.
    """
    ordered = sorted(pairs, key=lambda pair: -pair[0])
    each = 1 - (1 - confidence) / CANDIDATES
    found: Threshold | None = None
    for number in range(1, CANDIDATES + 1):
        size = ceil(len(ordered) * number / CANDIDATES)
        if size == 0:
            return None
        score = ordered[size - 1][0]
        accepted = [agreed for value, agreed in ordered if value >= score]  # equal scores are accepted together
        if sum(accepted) < agreement * len(accepted):
            continue  # the bound is lower still
        bound = exact_lower(sum(accepted), len(accepted), each)
        if bound >= agreement:
            found = Threshold(score, bound, len(accepted), sum(accepted), len(ordered))
    return found


def _at_least(hits: int, total: int, share: float) -> float:
    """The probability of at least `hits` of `total` at this share."""
    if share <= 0.0 or share >= 1.0:
        return float(share >= 1.0)
    terms = (
        lgamma(total + 1)
        - lgamma(number + 1)
        - lgamma(total - number + 1)
        + number * log(share)
        + (total - number) * log(1 - share)
        for number in range(hits, total + 1)
    )
    return min(1.0, sum(exp(term) for term in terms))
