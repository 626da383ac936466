"""How far waits have been from what was predicted, and quantiles that keep their word.

Two parts. `ErrorHistogram` holds the recent logarithms of actual over predicted wait as a histogram that forgets: its
quantiles stretch a prediction. `ConformalCorrection` moves the stated P90 after every outcome, up by step · 0.9 after a
miss and down by step · 0.1 after a hit, so that in the long run nine in ten outcomes are within what was stated,
whatever the histogram got wrong (adaptive conformal inference, Gibbs and Candès, 2021).

The n jobs that stand in a queue share one error. Each outcome therefore counts by how much of its own wait has passed
since the outcome before: a backlog that goes in one piece is a few observations, not hundreds.
"""

from math import exp

from inferry.domain.lanes import Lane

_MIN_LOG_ERROR, _BIN_WIDTH, _BINS = -3.0, 0.1, 70
_NORMAL_DECILES = (-1.64, -1.04, -0.67, -0.39, -0.13, 0.13, 0.39, 0.67, 1.04, 1.64)
"""Ten equally likely values of a standard normal distribution."""
MEMORY_OBSERVATIONS = 150.0
"""Observations after which an older one counts for a third."""
PRIOR_WEIGHT = 10.0
_RESCALE_ABOVE = 1e9

TARGET_COVERAGE = 0.9
CORRECTION_STEP = 0.05
MIN_CORRECTION, MAX_CORRECTION = -1.0, 1.2
"""Between 0.4 and 3.3 times what the histogram says."""
_CORRECTIONS_PER_WAIT = 120.0
_OBSERVATIONS_PER_WAIT = 100.0
_MIN_WEIGHT = 0.01
_WAIT_OFFSET_S = 0.01


class ErrorHistogram:
    """A histogram of log(actual / predicted), from a normal prior. Quantiles as factors: `p10`, `p50`, `p90`.

    `evidence` is how many recent observations they rest on, those of the prior included.
    """

    __slots__ = ("_last", "_refresh_in", "_scale", "_weights", "evidence", "p10", "p50", "p90")

    def __init__(self, center: float, spread: float) -> None:
        self._weights = [0.0] * _BINS
        for value in _NORMAL_DECILES:
            self._weights[_bin_of(center + spread * value)] += PRIOR_WEIGHT / len(_NORMAL_DECILES)
        self._scale = 1.0
        self._refresh_in = 0.0
        self._last = 0.0
        self.p10 = self.p50 = self.p90 = 1.0
        self.evidence = PRIOR_WEIGHT
        self._refresh()

    def add(self, error: float, wait_s: float, now: float) -> tuple[int, float]:
        """Count an outcome; return what `revise` needs to correct it."""
        weight = _weight(now - self._last, wait_s, _OBSERVATIONS_PER_WAIT)
        self._last = now
        self._scale *= 1.0 + weight / MEMORY_OBSERVATIONS
        bin_index, amount = _bin_of(error), weight * self._scale
        self._weights[bin_index] += amount
        self._refresh_in -= weight
        if self._scale > _RESCALE_ABOVE:
            self._weights = [each / self._scale for each in self._weights]
            self._scale = 1.0
            amount = weight
        if self._refresh_in <= 0:
            self._refresh()
        return bin_index, amount

    def revise(self, counted: tuple[int, float], error: float) -> None:
        """What was counted by `add` turned out to be this."""
        bin_index, amount = counted
        amount = min(amount, self._weights[bin_index])
        self._weights[bin_index] -= amount
        self._weights[_bin_of(error)] += amount

    def _refresh(self) -> None:
        weights = self._weights
        total = sum(weights, 0.0)
        self.evidence = total / self._scale
        # A sixteenth of the evidence has to be new before the quantiles are computed again.
        self._refresh_in = max(1.0, total / self._scale / 16)
        quantiles = []
        cumulative, bins = 0.0, iter(enumerate(weights))
        bin_index, weight = next(bins)
        for level in (0.1, 0.5, TARGET_COVERAGE):
            target = level * total
            while cumulative + weight < target:
                cumulative += weight
                bin_index, weight = next(bins)
            quantiles.append(exp(_MIN_LOG_ERROR + _BIN_WIDTH * (bin_index + (target - cumulative) / weight)))
        self.p10, self.p50, self.p90 = quantiles


class ConformalCorrection:
    """By how much the stated P90 of a lane is stretched beyond what the histogram says. `factor` is what to use."""

    __slots__ = ("_last", "_value", "covered", "factor", "jobs")

    def __init__(self) -> None:
        self._value = 0.0
        self._last = 0.0
        self.factor = 1.0
        self.jobs = 0
        self.covered = 0.0

    def record(self, was_covered: bool, wait_s: float, now: float) -> None:
        """The time that was stated is up, or the job has gone: whether the statement held."""
        step = CORRECTION_STEP * _weight(now - self._last, wait_s, _CORRECTIONS_PER_WAIT)
        self._last = now
        updated = self._value + step * (TARGET_COVERAGE - 1.0 if was_covered else TARGET_COVERAGE)
        self._value = min(MAX_CORRECTION, max(MIN_CORRECTION, updated))
        self.factor = exp(self._value)
        self.jobs += 1
        self.covered += max(1 / 1000, 1 / self.jobs) * (was_covered - self.covered)


def error_histograms(priors: tuple[tuple[float, float], ...]) -> list[list[ErrorHistogram]]:
    """For every lane, one histogram for each of the priors (middle, spread)."""
    return [[ErrorHistogram(center, spread) for center, spread in priors] for _ in Lane]


def _weight(elapsed_s: float, wait_s: float, per_wait: float) -> float:
    return max(_MIN_WEIGHT, min(1.0, per_wait * elapsed_s / (wait_s + _WAIT_OFFSET_S)))


def _bin_of(error: float) -> int:
    return min(_BINS - 1, max(0, int((error - _MIN_LOG_ERROR) / _BIN_WIDTH)))
