"""How far waits have been from what was predicted, and quantiles that keep their word.

Two parts. `Errors` holds the recent logarithms of actual over predicted wait as a histogram that forgets: its quantiles
stretch a prediction. `Correction` moves the stated P90 after every outcome, up by step · 0.9 after a miss and down by
step · 0.1 after a hit, so that in the long run nine in ten outcomes are within what was stated, whatever the histogram
got wrong (adaptive conformal inference, Gibbs and Candès, 2021).

The n jobs that stand in a queue share one error. Each outcome therefore counts by how much of its own wait has passed
since the outcome before: a backlog that goes in one piece is a few observations, not hundreds.
"""

from math import exp

from inferry.domain.lanes import Lane

_LOWEST, _STEP, _BINS = -3.0, 0.1, 70
_NORMAL = (-1.64, -1.04, -0.67, -0.39, -0.13, 0.13, 0.39, 0.67, 1.04, 1.64)
"""Ten equally likely values of a standard normal distribution."""
MEMORY = 150.0
"""Observations after which an older one counts for a third."""
PRIOR_WEIGHT = 10.0
_TOO_HEAVY = 1e9

LEVEL = 0.9
CORRECTION_STEP = 0.05
LEAST_CORRECTION, MOST_CORRECTION = -1.0, 1.2
"""Between 0.4 and 3.3 times what the histogram says."""
_CORRECTED_PER_WAIT = 120.0
_SEEN_PER_WAIT = 100.0
_LEAST_WEIGHT = 0.01
_SHORT_S = 0.01


class Errors:
    """A histogram of log(actual / predicted), from a normal prior. Quantiles as factors: `p10`, `p50`, `p90`.

    `evidence` is how many recent observations they rest on, those of the prior included.
    """

    __slots__ = ("_fresh", "_last", "_scale", "_weights", "evidence", "p10", "p50", "p90")

    def __init__(self, middle: float, spread: float) -> None:
        self._weights = [0.0] * _BINS
        for value in _NORMAL:
            self._weights[_bin_of(middle + spread * value)] += PRIOR_WEIGHT / len(_NORMAL)
        self._scale = 1.0
        self._fresh = 0.0
        self._last = 0.0
        self.p10 = self.p50 = self.p90 = 1.0
        self.evidence = PRIOR_WEIGHT
        self._refresh()

    def add(self, error: float, wait_s: float, now: float) -> tuple[int, float]:
        """Count an outcome; return what `move` needs to correct it."""
        weight = _weight(now - self._last, wait_s, _SEEN_PER_WAIT)
        self._last = now
        self._scale *= 1.0 + weight / MEMORY
        place, amount = _bin_of(error), weight * self._scale
        self._weights[place] += amount
        self._fresh -= weight
        if self._scale > _TOO_HEAVY:
            self._weights = [each / self._scale for each in self._weights]
            self._scale = 1.0
            amount = weight
        if self._fresh <= 0:
            self._refresh()
        return place, amount

    def move(self, counted: tuple[int, float], error: float) -> None:
        """What was counted by `add` turned out to be this."""
        place, amount = counted
        amount = min(amount, self._weights[place])
        self._weights[place] -= amount
        self._weights[_bin_of(error)] += amount

    def _refresh(self) -> None:
        weights = self._weights
        total = sum(weights, 0.0)
        self.evidence = total / self._scale
        # A sixteenth of the evidence has to be new before the quantiles are computed again.
        self._fresh = max(1.0, total / self._scale / 16)
        found = []
        passed, places = 0.0, iter(enumerate(weights))
        place, weight = next(places)
        for level in (0.1, 0.5, LEVEL):
            wanted = level * total
            while passed + weight < wanted:
                passed += weight
                place, weight = next(places)
            found.append(exp(_LOWEST + _STEP * (place + (wanted - passed) / weight)))
        self.p10, self.p50, self.p90 = found


class Correction:
    """By how much the stated P90 of a lane is stretched beyond what the histogram says. `factor` is what to use."""

    __slots__ = ("_last", "_value", "factor", "jobs", "within")

    def __init__(self) -> None:
        self._value = 0.0
        self._last = 0.0
        self.factor = 1.0
        self.jobs = 0
        self.within = 0.0

    def judge(self, held: bool, wait_s: float, now: float) -> None:
        """The time that was stated is up, or the job has gone: whether the statement held."""
        step = CORRECTION_STEP * _weight(now - self._last, wait_s, _CORRECTED_PER_WAIT)
        self._last = now
        moved = self._value + step * (LEVEL - 1.0 if held else LEVEL)
        self._value = min(MOST_CORRECTION, max(LEAST_CORRECTION, moved))
        self.factor = exp(self._value)
        self.jobs += 1
        self.within += max(1 / 1000, 1 / self.jobs) * (held - self.within)


def lanes_of_errors(priors: tuple[tuple[float, float], ...]) -> list[list[Errors]]:
    """For every lane, one histogram for each of the priors (middle, spread)."""
    return [[Errors(middle, spread) for middle, spread in priors] for _ in Lane]


def _weight(elapsed_s: float, wait_s: float, per_wait: float) -> float:
    return max(_LEAST_WEIGHT, min(1.0, per_wait * elapsed_s / (wait_s + _SHORT_S)))


def _bin_of(error: float) -> int:
    return min(_BINS - 1, max(0, int((error - _LOWEST) / _STEP)))
