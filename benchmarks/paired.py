"""The difference of two paired measurements: median and confidence interval.

The interval is distribution-free (sign test): the true median lies between the k-th smallest and the k-th largest
difference unless at least n - k + 1 of n fall on one side of it by chance.
"""

import statistics
from collections.abc import Sequence
from math import comb

from msgspec import Struct

CONFIDENCE = 0.95
MIN_PAIRS = 6
"""With fewer pairs no interval has this confidence."""


class Difference(Struct, frozen=True):
    """The median difference, and the interval that holds the true one with at least `confidence`."""

    median: float
    low: float
    high: float
    confidence: float
    pairs: int


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """`first` minus `second`, pair by pair."""
    differences = sorted(a - b for a, b in zip(first, second, strict=True))
    count = len(differences)
    if count < MIN_PAIRS:
        raise ValueError(f"{MIN_PAIRS} pairs are the least that tell anything, not {count}")
    outside, cut = 2.0 * 0.5**count, 1
    while outside + 2 * comb(count, cut) * 0.5**count <= 1 - CONFIDENCE:
        outside += 2 * comb(count, cut) * 0.5**count
        cut += 1
    return Difference(
        median=statistics.median(differences),
        low=differences[cut - 1],
        high=differences[count - cut],
        confidence=1 - outside,
        pairs=count,
    )
