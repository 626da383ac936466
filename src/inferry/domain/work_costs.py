"""What a unit of an engine's work costs: seconds per step, per output token, per prompt token and per KV token read.

The time of a step is shared by these costs: what a sequence adds to the step is its own, and the fixed part of the step
is divided evenly among the sequences in it (the Shapley value of the step's cost). The busy time of an engine is

    busy = base * steps + token * output tokens + prompt * prompt tokens + kv * KV tokens read

The costs follow by least squares, regularised towards calibrated ratios (ridge regression). Where observations separate
the costs, they decide; where every step is like the next, the calibrated ratios split the sum. Old observations decay.
"""

from math import exp
from typing import Final

SMOOTHING_S: Final = 1.0
"""Smoothing of the observed sums, in seconds: counters are read some steps before or after the time they belong to."""
MEMORY_S: Final = 120.0
"""Time constant of the least-squares sums, in seconds."""
PRIOR_COSTS: Final = (200.0, 1.0, 1.0, 0.002)
"""Costs of a step, an output token, a prompt token and a KV token read, in the cost of a prompt token, as calibrated
for an 8B model on an H200. Only their ratios matter: the observed time gives the scale."""
PRIOR_WEIGHT: Final = 0.002
"""Weight of the prior, relative to the observed sum of squares of each term."""
_TERMS = len(PRIOR_COSTS)
SOLVE_INTERVAL_STEPS: Final = 32
"""An engine that learns from each of its steps computes the costs anew after this many."""
_SWEEPS = 50
_MIN_COST_S = 1e-12


class WorkCosts:
    """Seconds per unit of work. Before anything was observed they have the calibrated ratios.

    `is_exact`: what is added is one step with its own work, so nothing is smoothed.
    """

    __slots__ = ("_is_exact", "_is_known", "_moments", "_smoothed", "_spent", "base_s", "kv_s", "prompt_s", "token_s")

    def __init__(self, *, is_exact: bool = False) -> None:
        self._is_exact = is_exact
        self._is_known = False
        self.base_s, self.token_s, self.prompt_s, self.kv_s = [1e-5 * cost for cost in PRIOR_COSTS]
        self._smoothed = [0.0] * (_TERMS + 1)
        self._moments = [[0.0] * _TERMS for _ in range(_TERMS)]
        self._spent = [0.0] * _TERMS

    def add(
        self, elapsed_s: float, busy_s: float, steps: float, tokens: float, prompt_tokens: float, kv_tokens: float
    ) -> None:
        """Learn from `elapsed_s` seconds, of which the engine was busy for `busy_s`."""
        decay = 0.0 if self._is_exact else exp(-elapsed_s / SMOOTHING_S)
        new = (steps, tokens, prompt_tokens, kv_tokens, busy_s)
        self._smoothed = [old * decay + one for old, one in zip(self._smoothed, new, strict=True)]
        busy = self._smoothed[_TERMS]
        if busy <= 0:
            return
        decay = exp(-elapsed_s / MEMORY_S)
        for i in range(_TERMS):
            row, count = self._moments[i], self._smoothed[i]
            for j in range(_TERMS):
                row[j] = row[j] * decay + count * self._smoothed[j]
            self._spent[i] = self._spent[i] * decay + count * busy

    def solve(self) -> None:
        """Minimise the squared error plus the weighted distance from the prior, over positive costs.

        Coordinate descent from the previous costs, at first from the prior: each cost in turn takes its best value, the
        others being fixed.
        """
        moments, spent = self._moments, self._spent
        explained = sum([a * b * moments[i][j] for i, a in enumerate(PRIOR_COSTS) for j, b in enumerate(PRIOR_COSTS)])
        if explained <= 0:
            return
        scale = sum([cost * spent[i] for i, cost in enumerate(PRIOR_COSTS)]) / explained
        prior = [scale * cost for cost in PRIOR_COSTS]
        costs = [self.base_s, self.token_s, self.prompt_s, self.kv_s] if self._is_known else list(prior)
        self._is_known = True
        for _ in range(_SWEEPS):
            for i in range(_TERMS):
                row = moments[i]
                weight = row[i]
                if weight <= 0:
                    costs[i] = prior[i]
                    continue
                rest = spent[i] - sum([row[j] * costs[j] for j in range(_TERMS) if j != i])
                best = (rest + PRIOR_WEIGHT * weight * prior[i]) / ((1 + PRIOR_WEIGHT) * weight)
                costs[i] = max(best, _MIN_COST_S)
        self.base_s, self.token_s, self.prompt_s, self.kv_s = costs
