"""Plain values of the predictors.

Kept apart from the code that computes them: mypyc compiles that code and cannot compile structs.
"""

from msgspec import Struct


class LengthQuery(Struct, frozen=True, gc=False):
    """What is known of a job before it runs, as far as its length goes. `token_budget` is the most it may write."""

    tenant: str
    model: str
    prompt_tokens: int
    token_budget: int
    template: str | None = None
    hint: int | None = None


class Accuracy(Struct, frozen=True, gc=False):
    """How good predictions have been: 0.69 of mean absolute log error is a factor of two. Recent jobs count for more.

    `coverage` is the part of jobs whose length was within [low, high]; 0.8 is what these mean. Caps only raise it.
    """

    jobs: int
    mean_abs_log_error: float
    coverage: float


class Spread(Struct, frozen=True, gc=False):
    """Natural logarithms of a length's tenth percentile, mean and ninetieth percentile."""

    low: float
    mean: float
    high: float

    def mixed_with(self, other: "Spread", weight: float) -> "Spread":
        """This spread with `weight` of the other mixed in."""
        kept = 1 - weight
        return Spread(
            kept * self.low + weight * other.low,
            kept * self.mean + weight * other.mean,
            kept * self.high + weight * other.high,
        )


class Coverage(Struct, frozen=True, gc=False):
    """How many statements were judged, and the part of them that held."""

    jobs: int
    covered: float


class PrefixMatch(Struct, frozen=True, gc=False):
    """How much of a prompt came before, as a part of it; and its chain, thinned out: short beginnings, then longer."""

    share: float = 0.0
    chain: tuple[str, ...] = ()
