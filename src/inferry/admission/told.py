"""What was said about a job's wait, kept until it is known how it came out."""

from math import inf
from typing import Final

from inferry.admission.calibration import Errors
from inferry.admission.rates import Seconds
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ahead, PredictedWait
from inferry.domain.values import Value


class Told(PredictedWait):
    """A statement about one job, and what it takes to learn from what comes of it. Belongs to the model.

    The prediction was made of `amounts` (jobs, prompt and output tokens before it, with its own), each of which takes
    `seconds`.
    """

    def __init__(
        self,
        p50_s: float,
        p90_s: float,
        p10_s: float,
        lane: Lane,
        at: float,
        middle_s: float,
        errors: Errors,
        ahead: Ahead,
        prompt_tokens: int,
        output_tokens: int,
        amounts: tuple[int, int, int],
        seconds: Seconds,
        waited_s: float | None = None,
        has_left: bool = False,
        counted: tuple[int, float] | None = None,
    ) -> None:
        super().__init__(p50_s, p90_s)
        self.p10_s = p10_s
        self.lane = lane
        self.at = at
        self.middle_s = middle_s
        self.errors = errors
        self.ahead = ahead
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.amounts = amounts
        self.seconds = seconds
        self.waited_s = waited_s
        self.has_left = has_left
        self.counted = counted


class Stretch(Value):
    """By what a predicted wait of one horizon is multiplied to get its quantiles, and what these are at least and at
    most: where two horizons meet, the nearer never tells more than the farther.
    """

    def __init__(
        self,
        errors: Errors,
        p10: float,
        p50: float,
        p90: float,
        least_p10: float = 0.0,
        least_p50: float = 0.0,
        least_p90: float = 0.0,
        most_p10: float = inf,
        most_p50: float = inf,
        most_p90: float = inf,
    ) -> None:
        self.errors: Final = errors
        self.p10: Final = p10
        self.p50: Final = p50
        self.p90: Final = p90
        self.least_p10: Final = least_p10
        self.least_p50: Final = least_p50
        self.least_p90: Final = least_p90
        self.most_p10: Final = most_p10
        self.most_p50: Final = most_p50
        self.most_p90: Final = most_p90
