"""What the time of an engine is spent on, learned from outside: seconds per step, per output token, per prompt token.

The busy time of an engine that batches continuously is

    busy = base * steps + token * output tokens + prompt * prompt tokens

All four sums are observed, so the three costs follow by least squares, regularised towards calibrated costs (ridge
regression). Where observations separate the costs, they decide. Where every step is like the next, they determine only
the sum, and the calibrated ratios split it. Old observations decay.
"""

from math import exp
from typing import Final

SMOOTHING_S = 1.0
"""Smoothing of the observed sums, in seconds: prompt tokens are counted when their prompt is done."""
MEMORY_S = 20.0
"""Time constant of the least-squares sums, in seconds."""
PRIOR_COSTS = (200.0, 4.0, 1.0)
"""Costs of a step, an output token and a prompt token in the cost of a prompt token, as calibrated for an 8B model on
an H200. Only their ratios matter: the observed time gives the scale."""
PRIOR_WEIGHT: Final = 0.05
"""Weight of the prior, relative to the observed sum of squares of each term. Prompts that are counted some steps before
or after they are computed vary by a few hundredths of their square; a smaller weight would learn from that."""
_SWEEPS: Final = 50
_MIN_COST_S: Final = 1e-9


class StepCostModel:
    """Seconds per step, per output token and per prompt token; all positive once `known`, else zero."""

    __slots__ = ("_moments", "_smoothed", "_spent", "base_s", "prompt_s", "token_s")

    def __init__(self) -> None:
        self.base_s = self.token_s = self.prompt_s = 0.0
        self._smoothed = [0.0, 0.0, 0.0, 0.0]
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._spent = [0.0] * 3

    @property
    def known(self) -> bool:
        """Whether prompt tokens have been observed."""
        return self.prompt_s > 0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prefill throughput of an engine that does nothing else. Only for costs that are known."""
        return 1.0 / self.prompt_s

    def step_s(self, sequences: float) -> float:
        """Duration of a step that decodes this many sequences and computes no prompt tokens."""
        return self.base_s + self.token_s * sequences

    def add(self, elapsed_s: float, busy_s: float, steps: float, tokens: float, prompt_tokens: float) -> None:
        """Learn from an interval of `elapsed_s`, of which the engine was busy for `busy_s`."""
        decay = exp(-elapsed_s / SMOOTHING_S)
        new = (steps, tokens, prompt_tokens, busy_s)
        *counts, busy = self._smoothed = [old * decay + one for old, one in zip(self._smoothed, new, strict=True)]
        if busy <= 0:
            return
        decay = exp(-elapsed_s / MEMORY_S)
        for i, count in enumerate(counts):
            row = self._moments[i]
            for j, other in enumerate(counts):
                row[j] = row[j] * decay + count * other
            self._spent[i] = self._spent[i] * decay + count * busy
        if self._moments[2][2] > 0:
            self._solve()

    def _solve(self) -> None:
        """Minimise the squared error plus the weighted distance from the prior, over positive costs.

        Coordinate descent from the previous costs: each cost in turn takes its best value, the others being fixed.
        """
        moments, spent = self._moments, self._spent
        explained = sum([a * b * moments[i][j] for i, a in enumerate(PRIOR_COSTS) for j, b in enumerate(PRIOR_COSTS)])
        scale = sum([cost * spent[i] for i, cost in enumerate(PRIOR_COSTS)]) / explained
        prior_base, prior_token, prior_prompt = [scale * cost for cost in PRIOR_COSTS]
        base, token, prompt = prior_base, prior_token, prior_prompt
        if self.known:
            base, token, prompt = self.base_s, self.token_s, self.prompt_s
        # Without lists or loops over the costs: several times a second for each worker, 50 sweeps each time.
        (base_2, base_token, base_prompt), (_, token_2, token_prompt), (_, _, prompt_2) = moments
        base_spent, token_spent, prompt_spent = spent
        for _ in range(_SWEEPS):
            base = _best_cost(base_spent - (base_token * token + base_prompt * prompt), base_2, prior_base)
            token = _best_cost(token_spent - (base_token * base + token_prompt * prompt), token_2, prior_token)
            prompt = _best_cost(prompt_spent - (base_prompt * base + token_prompt * token), prompt_2, prior_prompt)
        self.base_s, self.token_s, self.prompt_s = base, token, prompt


def _best_cost(rest: float, weight: float, prior: float) -> float:
    """The cost that explains the `rest` of the time best, where `weight` is the sum of squares of its term."""
    best = (rest + PRIOR_WEIGHT * weight * prior) / ((1 + PRIOR_WEIGHT) * weight) if weight else prior
    return best if best > _MIN_COST_S else _MIN_COST_S
