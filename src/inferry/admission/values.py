"""What the predictions are asked and what they answer: plain values.

Apart from what computes with them, for mypyc compiles that and cannot compile structs.
"""

from msgspec import Struct


class Question(Struct, frozen=True, gc=False):
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

    def towards(self, other: "Spread", weight: float) -> "Spread":
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
    within: float


class Line(Struct, frozen=True, kw_only=True):
    """One account, for people. Ceilings are None where there are none; `key_id` is None for the tenant's own."""

    kind: str
    spent_tokens: int
    leased_tokens: int
    token_ceiling: int | None
    spent_nanos: int
    leased_nanos: int
    nano_ceiling: int | None
    key_id: str | None = None
    run_id: str | None = None


class Standing(Struct, frozen=True):
    """Where a caller stands with its requests and tokens per minute: the tighter one of tenant and key.

    `reset_s` is how long until the bucket is full again. None where there is no such limit.
    """

    request_limit: int | None = None
    requests_left: int | None = None
    request_reset_s: float | None = None
    token_limit: int | None = None
    tokens_left: int | None = None
    token_reset_s: float | None = None
