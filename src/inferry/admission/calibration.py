"""Quantiles that keep their word: stated, compared with what happened, corrected.

A threshold stretches a prediction to a quantile. After an outcome beyond what was stated it rises by step · level,
after one within it falls by step · (1 - level). In the long run `level` of the outcomes are within what was stated,
whatever their distribution and however wrong the model is: the sum of the steps is bounded, so the misses cannot be
more or fewer than promised by more than that bound over the number of outcomes. This is adaptive conformal inference
(Gibbs and Candès, 2021) applied to the threshold itself.

Waits are known only when they are over. The n jobs that stand in a queue share one error and are told of it late, so
each counts for less the more of them there are: no burst moves a threshold far.
"""

from msgspec import Struct

STEP = 0.15
FIRST_OUTCOMES = 20
"""So many outcomes are followed with larger steps, falling to STEP."""
LOWEST, HIGHEST = -20.0, 40.0


class Threshold:
    """One quantile of one kind of prediction, in multiples of the spread expected."""

    __slots__ = ("count", "level", "lowest", "value")

    def __init__(self, level: float, value: float, lowest: float = LOWEST) -> None:
        self.level = level
        self.value = value
        self.lowest = lowest
        self.count = 0

    def learn(self, was_within: bool, weight: float) -> None:
        """An outcome, and whether it was within what its job had been told; `weight` as by `weight_of`."""
        self.count += 1
        step = STEP * weight * max(1.0, (FIRST_OUTCOMES / self.count) ** 0.5)
        moved = self.value + step * (self.level - 1 if was_within else self.level)
        self.value = min(HIGHEST, max(self.lowest, moved))


def weight_of(jobs_ahead: float) -> float:
    """How much the outcome of a job counts that had so many before it."""
    return float((1 + jobs_ahead) ** -0.3)


class Coverage(Struct, frozen=True, gc=False):
    """How often waits stayed within the P90 that was stated, over the jobs for which it was above the floor."""

    jobs: int
    within: float
