"""What was said about a job's wait, kept until it is known how it came out."""

from math import inf

from msgspec import Struct

from inferry.admission.calibration import Errors
from inferry.admission.rates import Seconds
from inferry.domain.jobs import Lane
from inferry.domain.plans import Ahead, PredictedWait


class Told(PredictedWait, gc=False):
    """A statement about one job, and what it takes to learn from what comes of it. Belongs to the model."""

    p10_s: float
    lane: Lane
    at: float
    middle_s: float
    errors: Errors
    ahead: Ahead
    prompt_tokens: int
    output_tokens: int
    amounts: tuple[int, int, int]
    """What the prediction was made of: jobs, prompt and output tokens before it, with its own; and what each takes."""
    seconds: Seconds
    waited_s: float | None = None
    has_left: bool = False
    counted: tuple[int, float] | None = None


class Stretch(Struct, frozen=True, gc=False):
    """By what a predicted wait of one horizon is multiplied to get its quantiles, and what these are at least and at
    most: where two horizons meet, the nearer never tells more than the farther.
    """

    errors: Errors
    p10: float
    p50: float
    p90: float
    least_p10: float = 0.0
    least_p50: float = 0.0
    least_p90: float = 0.0
    most_p10: float = inf
    most_p50: float = inf
    most_p90: float = inf
