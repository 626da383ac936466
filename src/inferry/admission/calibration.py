"""Quantiles that keep their word: stated, compared with what happened, corrected.

A score says how far an outcome was from the prediction. For each quantile a threshold follows the scores: up by
step · level after an outcome above it, down by step · (1 - level) after one below, which settles where `level` of the
scores are below it. Waits are known only after they are over, so a threshold that follows may lag; therefore the level
itself is trimmed by how often what was *stated* held, as in adaptive conformal inference (Gibbs and Candès, 2021).
Steps and trims are bounded: no burst of surprises moves a threshold further than the surprises themselves.
"""

from msgspec import Struct

STEP = 0.12
FIRST_STEPS = 20
"""So many outcomes are followed with larger steps, falling to STEP."""
TRIM = 0.01
LEVEL_BAND = 0.08
"""The level followed stays this close to the level promised (or half way to 1, where that is closer)."""


class Threshold:
    """One quantile of the scores of one kind of prediction."""

    __slots__ = ("_followed", "count", "level", "value")

    def __init__(self, level: float, value: float) -> None:
        self.level = level
        self.value = value
        self.count = 0
        self._followed = level

    def learn(self, score: float, stated_held: bool) -> None:
        """An outcome with this score; `stated_held` says whether it was within the quantile its job was told."""
        level = self.level
        self._followed += TRIM * ((1 - level) * -1 if stated_held else level)
        top = min(level + LEVEL_BAND, (1 + level) / 2 + (1 - level) * 0.3)
        self._followed = min(top, max(level - LEVEL_BAND, self._followed))
        self.count += 1
        step = STEP * max(1.0, FIRST_STEPS / self.count / 2)
        distance = score - self.value
        if distance > 0:
            self.value += min(step * self._followed, distance)
        elif distance < 0:
            self.value -= min(step * (1 - self._followed), -distance)


class Coverage(Struct, frozen=True, gc=False):
    """How often waits stayed within the P90 that was stated, over the jobs for which it was above the floor."""

    jobs: int
    within: float
