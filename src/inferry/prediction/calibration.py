"""Calibration of wait predictions: the distribution of their errors, and a P90 with the stated coverage.

- `ErrorHistogram` holds recent values of log(actual / predicted wait), with decaying weights. A prediction is
  multiplied by its quantiles.
- `ConformalCorrection` moves the stated P90 after every outcome: up by step · 0.9 after a miss, down by step · 0.1
  after a hit. In the long run nine in ten outcomes are covered, even where the histogram is wrong (adaptive conformal
  inference, Gibbs and Candès, 2021).

All jobs of one queue share one error. The weight of an outcome is therefore the time since the previous outcome,
relative to the job's wait: a backlog that drains at once counts as a few observations and not as hundreds.
"""

from math import exp
from typing import Final

from inferry.domain.lanes import Lane

_MIN_LOG_ERROR, _BIN_WIDTH, _BINS = -3.0, 0.1, 70
_NORMAL_DECILES = (-1.64, -1.04, -0.67, -0.39, -0.13, 0.13, 0.39, 0.67, 1.04, 1.64)
"""Ten equally likely values of a standard normal distribution."""
MEMORY_OBSERVATIONS: Final = 150.0
"""After this many further observations an observation has a third of its weight."""
PRIOR_WEIGHT = 10.0
_RESCALE_ABOVE: Final = 1e9

TARGET_COVERAGE: Final = 0.9
CORRECTION_STEP: Final = 0.05
MIN_CORRECTION, MAX_CORRECTION = -1.0, 1.2
"""Bounds of the logarithm of the correction: 0.4 to 3.3 times the histogram's P90."""
_CORRECTIONS_PER_WAIT: Final = 120.0
_OBSERVATIONS_PER_WAIT: Final = 100.0
_MIN_WEIGHT: Final = 0.01
_WAIT_OFFSET_S: Final = 0.01


class ErrorHistogram:
    """A histogram of log(actual / predicted) that starts from a normal prior.

    `p10`, `p50` and `p90` are its quantiles as factors. `evidence` is the weight of the recent observations and the
    prior together.
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
        """Count an outcome; return the bin and weight that `revise` takes to correct it."""
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
        """Move an outcome counted by `add` to its final error."""
        bin_index, amount = counted
        amount = min(amount, self._weights[bin_index])
        self._weights[bin_index] -= amount
        self._weights[_bin_of(error)] += amount

    def _refresh(self) -> None:
        weights = self._weights
        total = sum(weights, 0.0)
        self.evidence = total / self._scale
        # The quantiles are computed again when a sixteenth of the evidence is new.
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
    """The factor by which the histogram's P90 of a lane is multiplied, so that its coverage is 90 %.

    `covered` is the recent coverage over `jobs` outcomes.
    """

    __slots__ = ("_last", "_value", "covered", "factor", "jobs")

    def __init__(self) -> None:
        self._value = 0.0
        self._last = 0.0
        self.factor = 1.0
        self.jobs = 0
        self.covered = 0.0

    def record(self, was_covered: bool, wait_s: float, now: float) -> None:
        """Count an outcome: whether the job left the queue within the stated P90."""
        step = CORRECTION_STEP * _weight(now - self._last, wait_s, _CORRECTIONS_PER_WAIT)
        self._last = now
        updated = self._value + step * (TARGET_COVERAGE - 1.0 if was_covered else TARGET_COVERAGE)
        self._value = min(MAX_CORRECTION, max(MIN_CORRECTION, updated))
        self.factor = exp(self._value)
        self.jobs += 1
        self.covered += max(1 / 1000, 1 / self.jobs) * (was_covered - self.covered)


def error_histograms(priors: tuple[tuple[float, float], ...]) -> list[list[ErrorHistogram]]:
    """For every lane, one histogram per prior (center, spread)."""
    return [[ErrorHistogram(center, spread) for center, spread in priors] for _ in Lane]


def _weight(elapsed_s: float, wait_s: float, per_wait: float) -> float:
    return max(_MIN_WEIGHT, min(1.0, per_wait * elapsed_s / (wait_s + _WAIT_OFFSET_S)))


def _bin_of(error: float) -> int:
    return min(_BINS - 1, max(0, int((error - _MIN_LOG_ERROR) / _BIN_WIDTH)))
