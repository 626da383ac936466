"""The predicted wait of a job, kept until the actual wait is known."""

from math import inf
from typing import Final

from inferry.domain.lanes import Lane
from inferry.domain.plans import PredictedWait, QueuedAhead
from inferry.domain.values import Value
from inferry.prediction.calibration import ErrorHistogram
from inferry.prediction.drain_rates import SecondsPerUnit


class WaitPrediction(PredictedWait):
    """The prediction for one job, and what the model needs to learn from its outcome. Belongs to the model.

    It was computed from `amounts` (jobs, prompt and output tokens before the job, its own included) and `seconds` per
    unit.
    """

    def __init__(
        self,
        p50_s: float,
        p90_s: float,
        p10_s: float,
        lane: Lane,
        at: float,
        estimate_s: float,
        errors: ErrorHistogram,
        ahead: QueuedAhead,
        prompt_tokens: int,
        output_tokens: int,
        amounts: tuple[int, int, int],
        seconds: SecondsPerUnit,
        waited_s: float | None = None,
        was_removed: bool = False,
        counted: tuple[int, float] | None = None,
    ) -> None:
        super().__init__(p50_s, p90_s)
        self.p10_s = p10_s
        self.lane = lane
        self.at = at
        self.estimate_s = estimate_s
        self.errors = errors
        self.ahead = ahead
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.amounts = amounts
        self.seconds = seconds
        self.waited_s = waited_s
        self.was_removed = was_removed
        self.counted = counted


class QuantileFactors(Value):
    """The factors that turn an estimate of one horizon into quantiles, with bounds that keep quantiles monotone across
    horizons.
    """

    def __init__(
        self,
        errors: ErrorHistogram,
        p10: float,
        p50: float,
        p90: float,
        min_p10: float = 0.0,
        min_p50: float = 0.0,
        min_p90: float = 0.0,
        max_p10: float = inf,
        max_p50: float = inf,
        max_p90: float = inf,
    ) -> None:
        self.errors: Final = errors
        self.p10: Final = p10
        self.p50: Final = p50
        self.p90: Final = p90
        self.min_p10: Final = min_p10
        self.min_p50: Final = min_p50
        self.min_p90: Final = min_p90
        self.max_p10: Final = max_p10
        self.max_p50: Final = max_p50
        self.max_p90: Final = max_p90

    def quantiles(self, offset_s: float) -> tuple[float, float, float]:
        """P10, P50 and P90 of a wait, on the scale of `offset_s`."""
        # Comparisons instead of min and max: these lines run for every job.
        p10, p50, p90 = offset_s * self.p10, offset_s * self.p50, offset_s * self.p90
        if p10 < self.min_p10:
            p10 = self.min_p10
        elif p10 > self.max_p10:
            p10 = self.max_p10
        if p50 < self.min_p50:
            p50 = self.min_p50
        elif p50 > self.max_p50:
            p50 = self.max_p50
        if p90 < self.min_p90:
            p90 = self.min_p90
        elif p90 > self.max_p90:
            p90 = self.max_p90
        return p10, p50, p90
