"""Counters and histograms for one thread: no locks, a fraction of a microsecond per fact.

The event loop owns them and reads them at scrape time. From any other thread they would lose counts.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class FastCounter:
    """Only goes up. Code on the hot path adds to `value` directly."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1) -> None:
        self.value += amount


class FastHistogram:
    """`counts[i]` is how many values were at most `bounds[i]` and above the bound before; the last has no bound.

    `largest` is the largest value since the start, at least 0.
    """

    __slots__ = ("bounds", "counts", "largest", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds must rise strictly")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.largest = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        if value > self.largest:
            self.largest = value

    def cumulative(self) -> list[int]:
        """How many values were at most each bound, then how many there were."""
        return list(accumulate(self.counts))


class TickStatistics:
    """How long ticks of the scheduler take, and how many jobs each plans."""

    __slots__ = ("_jobs", "_seconds")

    def __init__(self, seconds: FastHistogram, jobs: FastHistogram) -> None:
        self._seconds = seconds
        self._jobs = jobs

    def record(self, seconds: float, jobs: int) -> None:
        self._seconds.observe(seconds)
        self._jobs.observe(jobs)
