"""What an engine's time goes into, learned from outside: a step, an output token, a prompt token.

Every busy second of an engine that batches continuously was spent on steps, on the sequences that each of them decoded,
and on prompt tokens: busy = base * steps + token * output tokens + prompt * prompt tokens. All four sums can be seen
from outside, so the three costs follow by least squares. Older sums count for less.
"""

from collections.abc import Sequence
from math import exp, inf

SMOOTHING_S = 1.0
"""Prompt tokens are counted when they are done, not while they are computed; over a second that evens out."""
MEMORY_S = 20.0
MIN_DROP_RATIO = 0.5
"""No cost falls faster than to this part in one go: a moment that misleads must not make anything look free."""
WARMUP_S = 5.0
WARMUP_DROP_RATIOS = (0.0, 0.0, 0.35)
"""Until the engine has been seen busy for so long costs are guesses, and may fall faster."""
FREE_PROMPT_PENALTY = 1.5
"""How much better an explanation without prompts must be. Where every step computes as many prompt tokens as the next,
the sums do not tell what a step costs from what its prompts do. Then prompts are taken to cost it: fewer will come, and
the sums will tell. The other way round prompts would look free, and ever more of them would come."""
MIN_VARIATION = 0.05
"""How much the prompt tokens of a step must vary, as a part of their square, to tell what a step costs from what its
prompts do. Prompts are counted when they are done, some earlier and some later than they were computed, and that alone
makes them vary by a few hundredths."""
MIN_PROMPT_SHARE = 0.45
"""Where steps are alike, or few were seen, the steady part of the time looks like steps and the noise like prompts:
prompts seem free, more of them come, every step is full, and the steps stay alike. So an explanation that leaves
prompts less than this part of the time is not believed there. The split between steps and prompts stays what it was,
moves slowly towards `TYPICAL_PROMPT_SHARE` where it gives them less, and only the sum of both is learned."""
TYPICAL_PROMPT_SHARE = 0.75
PROMPT_SHARE_STEP = 0.02
"""By what part of the time, each time."""
MIN_TOKEN_COST_RATIO = 1.0
"""An output token goes through the same layers as a prompt token, reads all that came before it, and is sampled and
sent: it costs at least so many times as much. Where few decode, the sums call it free, and all batch jobs at once would
be let in."""
PRIOR_WEIGHT = 0.002
"""How much what was believed before counts beside the sums: enough where they leave it open how time divides."""
_MIN_COST_S = 1e-9
_MIN_OBSERVED = (2, 16, 512)
"""Steps, output and prompt tokens that have to be seen at once for a first guess at what they cost."""
_INITIAL_SHARES = (0.1, 0.1, 0.8)
"""What steps, output and prompts are taken to have cost of the first moment they are seen in."""
_SUBSETS = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))


class StepCostModel:
    """Seconds per step, per output token and per prompt token; zero for what was never seen, else positive."""

    __slots__ = (
        "_busy_s",
        "_moments",
        "_observed",
        "_smoothed",
        "_spent",
        "_squared_busy",
        "base_s",
        "prompt_s",
        "token_s",
    )

    def __init__(self) -> None:
        self.base_s = self.token_s = self.prompt_s = 0.0
        self._smoothed = [0.0, 0.0, 0.0, 0.0]
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._spent = [0.0] * 3
        self._squared_busy = 0.0
        self._busy_s = 0.0
        self._observed = [False] * 3

    @property
    def known(self) -> bool:
        """Whether prompts have been seen to cost something."""
        return self.prompt_s > 0

    @property
    def prompt_tokens_per_s(self) -> float:
        """How fast an engine that does nothing else computes prompts. Only for costs that are known."""
        return 1.0 / self.prompt_s

    def step_s(self, sequences: float) -> float:
        """A step that decodes so many sequences and computes no prompts."""
        return self.base_s + self.token_s * sequences

    def add(self, elapsed_s: float, busy_s: float, steps: float, tokens: float, prompt_tokens: float) -> None:
        """In `elapsed_s` the engine was busy for `busy_s` and did all that."""
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
        self._squared_busy = self._squared_busy * decay + busy * busy
        self._busy_s += busy_s
        drop_ratios = (MIN_DROP_RATIO,) * 3 if self._busy_s > WARMUP_S else WARMUP_DROP_RATIOS
        costs = [self.base_s, self.token_s, self.prompt_s]
        self._initialize_new_terms(costs, counts, busy)
        self.base_s, self.token_s, self.prompt_s = [
            max(new, old * ratio, _MIN_COST_S) if observed else 0.0
            for new, old, ratio, observed in zip(self._solve(costs), costs, drop_ratios, self._observed, strict=True)
        ]
        if self._observed[1]:
            self.token_s = max(self.token_s, MIN_TOKEN_COST_RATIO * self.prompt_s)

    def _initialize_new_terms(self, costs: list[float], counts: list[float], busy: float) -> None:
        """Something seen for the first time is taken to cost a part of the time; the sums will tell."""
        present = [i for i, count in enumerate(counts) if self._observed[i] or count >= _MIN_OBSERVED[i]]
        for i in present:
            if not self._observed[i] and counts[i] >= 1:
                self._observed[i] = True
                costs[i] = busy / counts[i] * _INITIAL_SHARES[i] / sum(_INITIAL_SHARES[j] for j in present)

    def _solve(self, before: list[float]) -> list[float]:
        """The costs that explain the sums best, none of them negative. There are three: every choice of which of them
        are zero is tried.
        """
        observed = [i for i in range(3) if self._observed[i] and self._moments[i][i] >= 1]
        best, costs = inf, before
        for terms in _SUBSETS:
            if not all(i in observed for i in terms):
                continue
            rows = []
            for i in terms:
                prior = PRIOR_WEIGHT * self._moments[i][i]
                row = [self._moments[i][j] + (prior if i == j else 0.0) for j in terms]
                rows.append([*row, self._spent[i] + prior * before[i]])
            solution = _eliminate(rows)
            if solution is None or not all(cost >= 0 for cost in solution):
                continue
            residual = self._residual(terms, solution)
            if 2 not in terms and 2 in observed:
                residual *= FREE_PROMPT_PENALTY
            if residual < best:
                best = residual
                costs = [0.0 if i in observed else before[i] for i in range(3)]
                for i, cost in zip(terms, solution, strict=True):
                    costs[i] = cost
        if before[0] > 0 and before[2] > 0 and 0 in observed and 2 in observed and self._is_ambiguous(costs):
            return self._rescaled(before)
        return costs

    def _is_ambiguous(self, costs: Sequence[float]) -> bool:
        """Whether prompts look cheap where the sums cannot tell."""
        moments = self._moments
        variation = 1 - moments[0][2] ** 2 / (moments[0][0] * moments[2][2])
        if variation >= MIN_VARIATION and self._busy_s > WARMUP_S:
            return False
        # The part of prompts in what was spent while there were prompts: weighted by how many of them there were.
        return costs[2] * moments[2][2] < MIN_PROMPT_SHARE * self._spent[2]

    def _rescaled(self, before: Sequence[float]) -> list[float]:
        """The costs that explain the sums best among those that split time between steps and prompts as before."""
        base, _, prompt = before
        moments, spent = self._moments, self._spent
        on_steps, on_prompts = base * moments[0][2], prompt * moments[2][2]
        missing = TYPICAL_PROMPT_SHARE * spent[2] - on_prompts
        if missing > 0 and on_steps > 0:
            moved = min(missing, PROMPT_SHARE_STEP * spent[2], on_steps / 2)
            base *= 1 - moved / on_steps
            prompt *= 1 + moved / on_prompts
        both = base * base * moments[0][0] + 2 * base * prompt * moments[0][2] + prompt * prompt * moments[2][2]
        with_tokens = base * moments[0][1] + prompt * moments[2][1]
        both_spent = base * spent[0] + prompt * spent[2]
        tokens, tokens_spent = moments[1][1], spent[1]
        determinant = both * tokens - with_tokens * with_tokens
        if self._observed[1] and determinant > PRIOR_WEIGHT * both * tokens:
            scale = (both_spent * tokens - tokens_spent * with_tokens) / determinant
            token = (tokens_spent * both - both_spent * with_tokens) / determinant
            if scale > 0 and token > 0:
                return [base * scale, token, prompt * scale]
        scale = (both_spent - before[1] * with_tokens) / both
        return [base * scale, before[1], prompt * scale] if scale > 0 else list(before)

    def _residual(self, terms: Sequence[int], costs: Sequence[float]) -> float:
        """The sum of squares that these costs leave."""
        remaining = self._squared_busy
        for i, cost in zip(terms, costs, strict=True):
            remaining -= 2 * cost * self._spent[i]
            for j, other in zip(terms, costs, strict=True):
                remaining += cost * other * self._moments[i][j]
        return max(remaining, _MIN_COST_S * self._squared_busy)


def _eliminate(rows: list[list[float]]) -> list[float] | None:
    """Solve a few linear equations, symmetric and positive; None where they do not decide."""
    size = len(rows)
    for i in range(size):
        if rows[i][i] <= 0:
            return None
        for k in range(i + 1, size):
            ratio = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= ratio * rows[i][j]
    solution = [0.0] * size
    for i in range(size - 1, -1, -1):
        solution[i] = (rows[i][size] - sum([rows[i][j] * solution[j] for j in range(i + 1, size)])) / rows[i][i]
    return solution
