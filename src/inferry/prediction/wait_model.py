"""Predicts how long a job offered now waits until it is sent to a worker, and when a refused client should retry.

The estimate is a fluid model: what is queued before the job, times the seconds per unit (`drain_rates`), in jobs,
prompt tokens and output tokens. Each resource is weighted by how well it has predicted recently, so that the binding
one takes over. A lane with a share may be served before higher lanes: then only what is before the job in its own lane
counts. Quantiles around the estimate are learned from the errors of past predictions (`calibration`), for each lane and
separately for short and long waits.

A prediction is evaluated when its P90 has passed, by whether the job was sent before. Evaluation when a job is sent
would count short waits before long ones, and underestimate while queues grow. Before the first measurement the
predicted wait is nearly zero, so that no job is refused for lack of data.

One model serves one scheduler and has one owner, which calls `predict`, then `queued` if the job was admitted, then
`sent` or `left`, each after the queue depth has changed.
"""

from bisect import bisect_right
from collections import deque
from heapq import heappop, heappush
from math import inf, log
from typing import Final

from inferry.domain.errors import DeadlineInfeasible
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.plans import QueuedAhead
from inferry.domain.queue_depth import QueueDepth
from inferry.prediction.calibration import ConformalCorrection, ErrorHistogram, error_histograms
from inferry.prediction.drain_rates import UNKNOWN_RATES, DrainRates, SecondsPerUnit
from inferry.prediction.values import Coverage
from inferry.prediction.wait_prediction import QuantileFactors, WaitPrediction

FLOOR_S: Final = 0.05
"""Differences below this (seconds) are ignored."""
MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 92.0
"""An answer adds up to a quarter, and OpenAI's clients do not wait for more than two minutes."""
MAX_WAIT_S: Final = 3600.0

NOTHING_AHEAD: Final = QueuedAhead()
_HORIZONS_S = (0.1, 0.4, 1.6, 6.4, 25.6)
_PRIORS = ((0.0, 1.0), (0.0, 0.8), (0.05, 0.5), (0.05, 0.4), (0.05, 0.3), (0.05, 0.3))
"""Prior mean and spread of log(actual / predicted): long waits average over more jobs."""
_NEAR_S, _FAR_S = 2.0, 8.0
"""Waits below the first use the shortest time constant, beyond the second the longest."""
_LOG_OFFSET_S: Final = 0.01
"""Errors are logarithmic, and linear for waits below this."""
_CENSORED_LOG_ERROR: Final = 0.35
"""A wait beyond its P90 that has not ended counts as longer than the P90 by this log error."""
_ERROR_RATE: Final = 0.03
_MIN_NET_DRAIN: Final = 0.25


class WaitModel:
    """Predicts waits and learns from them. O(1) per job but for a heap; no call waits or looks at a clock."""

    def __init__(self, depth: QueueDepth) -> None:
        self._depth = depth
        self._drain_rates = DrainRates(depth)
        self._errors = error_histograms(_PRIORS)
        self._corrections = [ConformalCorrection() for _ in Lane]
        self._squared_errors = [[0.25, 0.25, 0.25] for _ in Lane]
        self._blended: list[list[SecondsPerUnit]] = [[UNKNOWN_RATES] * 3 for _ in Lane]
        self._lane_blended: list[list[SecondsPerUnit]] = [[UNKNOWN_RATES] * 3 for _ in Lane]
        self._factors = [self._factors_of(lane) for lane in Lane]
        self._unscheduled: list[WaitPrediction] = []
        self._due: list[tuple[float, int, WaitPrediction]] = []
        # Most predictions are at the floor and due in the order in which they were made: a heap would cost more.
        self._due_at_floor: deque[tuple[float, int, WaitPrediction]] = deque()
        self._push_count = 0

    # -- predictions -------------------------------------------------------------------------------------------------

    def has_queue_ahead(self, lane: Lane) -> bool:
        """Whether any job is queued at or above the lane."""
        return self._depth.at_or_above[lane] > 0

    def predict(
        self, lane: Lane, prompt_tokens: int, output_tokens: int, ahead: QueuedAhead, now: float
    ) -> WaitPrediction:
        """The wait of a job with these expected tokens, offered now behind what is `ahead`. Changes nothing.

        Between two updates, more work ahead never shortens the predicted wait of the same job.
        """
        drain_rates, queued_above = self._drain_rates, self._depth.above[lane]
        amounts = (ahead.jobs + 1, ahead.prompt_tokens + prompt_tokens, ahead.output_tokens + output_tokens)
        in_lane = amounts
        if queued_above[0]:
            # At least the job itself: `queued_above` may count a job that `ahead` does not.
            in_lane = (
                max(1, amounts[0] - queued_above[0]),
                max(prompt_tokens, amounts[1] - queued_above[1]),
                max(output_tokens, amounts[2] - queued_above[2]),
            )
        estimate_s, is_lane_share, horizon = self._estimate_wait(lane, amounts, in_lane)
        factors = self._factors[lane][bisect_right(_HORIZONS_S, estimate_s)]
        offset_s = estimate_s + _LOG_OFFSET_S
        p10, p50, p90 = factors.quantiles(offset_s)
        if amounts[0] == 1:
            # Nothing is ahead: free capacity decides, which the queue does not show.
            factors = self._factors[lane][0]
            if p10 > (own := offset_s * factors.p10):
                p10 = own
            if p50 > (own := offset_s * factors.p50):
                p50 = own
            if p90 > (own := offset_s * factors.p90):
                p90 = own
        p10, p50, p90 = p10 - _LOG_OFFSET_S, p50 - _LOG_OFFSET_S, p90 - _LOG_OFFSET_S
        if p10 < 0.0:
            p10 = 0.0
        if p50 < p10:
            p50 = p10
        return WaitPrediction(
            p50,
            p90 if p90 > p50 else p50,
            p10,
            lane,
            now,
            estimate_s,
            factors.errors,
            ahead,
            prompt_tokens,
            output_tokens,
            in_lane if is_lane_share else amounts,
            (drain_rates.lane_seconds if is_lane_share else drain_rates.seconds)[lane][horizon],
        )

    def _estimate_wait(
        self, lane: Lane, amounts: tuple[int, int, int], in_lane: tuple[int, int, int]
    ) -> tuple[float, bool, int]:
        """The middle estimate in seconds, whether it counts the job's own lane only, and the memory that it uses."""
        estimate_s, is_lane_share = self._estimate_with(lane, 1, amounts, in_lane)
        if estimate_s < _NEAR_S:
            estimate_s, is_lane_share = self._estimate_with(lane, 0, amounts, in_lane)
            return (estimate_s if estimate_s < _NEAR_S else _NEAR_S), is_lane_share, 0
        if estimate_s > _FAR_S:
            estimate_s, is_lane_share = self._estimate_with(lane, 2, amounts, in_lane)
            return min(MAX_WAIT_S, max(_FAR_S, estimate_s)), is_lane_share, 2
        return estimate_s, is_lane_share, 1

    def _estimate_with(
        self, lane: Lane, horizon: int, amounts: tuple[int, int, int], in_lane: tuple[int, int, int]
    ) -> tuple[float, bool]:
        """Seconds until everything ahead is sent, or everything ahead in the lane if that is sooner; whether it is."""
        jobs, prompt, output = amounts
        by_job, by_prompt, by_output = self._blended[lane][horizon]
        full_wait_s = jobs * by_job + prompt * by_prompt + output * by_output
        if lane:
            jobs, prompt, output = in_lane
            by_job, by_prompt, by_output = self._lane_blended[lane][horizon]
            lane_wait_s = jobs * by_job + prompt * by_prompt + output * by_output
            if 0.0 < lane_wait_s < full_wait_s:
                return lane_wait_s, True
        return full_wait_s, False

    def retry_after(self, prediction: WaitPrediction, target_wait_s: float | None = None) -> float:
        """Seconds until the client of this prediction should retry, from MIN_RETRY_S to MAX_RETRY_S.

        Without `target_wait_s`: when what is queued before it has left. With it: when the median wait of such a job
        will have fallen to that. The queue shrinks at the sent rate less the arrival rate, and at least at a quarter of
        the sent rate, since refused clients arrive later.
        """
        seconds = prediction.p50_s
        if target_wait_s is not None:
            seconds = (seconds - target_wait_s) / max(
                _MIN_NET_DRAIN, self._drain_rates.net_drain_fraction(prediction.lane)
            )
        return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))

    def seconds_per_job(self, prediction: WaitPrediction) -> tuple[float, float]:
        """Seconds per job ahead: at present, and without arrivals in higher lanes. Zero where nothing was measured."""
        if prediction.estimate_s <= 0:
            return 0.0, 0.0
        now_s = prediction.p50_s / prediction.amounts[0]
        best_case_s_per_job = self._drain_rates.best_case_s_per_job(prediction.lane)
        return now_s, min(now_s, best_case_s_per_job) if best_case_s_per_job else now_s

    def coverage(self, lane: Lane) -> Coverage:
        """How often the P90 held where it was above the floor. Recent jobs weigh more."""
        correction = self._corrections[lane]
        return Coverage(correction.jobs, correction.covered)

    def coverages(self) -> dict[Lane, float]:
        """The share that held, for every lane with evaluated predictions."""
        return {lane: found.covered for lane in Lane if (found := self.coverage(lane)).jobs}

    # -- learning ----------------------------------------------------------------------------------------------------

    def queued(self, prediction: WaitPrediction, now: float) -> None:
        """The job was queued."""
        self._drain_rates.joined(prediction.lane, prediction.prompt_tokens, prediction.output_tokens, now)
        self._unscheduled.append(prediction)
        if now >= self._drain_rates.next_update_at:
            self._update(now)

    def sent(self, prediction: WaitPrediction, now: float) -> None:
        """The job was given to a worker."""
        waited = prediction.waited_s = now - prediction.at
        self._drain_rates.sent(prediction.lane, prediction.prompt_tokens, prediction.output_tokens, waited, now)
        if prediction.counted is not None:
            prediction.errors.revise(prediction.counted, _error(waited, prediction))
        if waited > FLOOR_S:
            self._update_resource_errors(prediction, waited)
        if now >= self._drain_rates.next_update_at:
            self._update(now)

    def left(self, prediction: WaitPrediction, now: float) -> None:
        """The job left the queue without being sent: cancelled or expired. Nothing is learned from its wait."""
        prediction.was_removed = True
        self._drain_rates.depth_changed(prediction.lane, now)
        if now >= self._drain_rates.next_update_at:
            self._update(now)

    def depth_changed(self, lane: Lane, now: float) -> None:
        """A job without a prediction, such as a retry, has joined or left the queue: only busy time counts."""
        self._drain_rates.depth_changed(lane, now)

    def _update_resource_errors(self, prediction: WaitPrediction, waited_s: float) -> None:
        squared_errors, seconds, amounts = self._squared_errors[prediction.lane], prediction.seconds, prediction.amounts
        for resource in range(3):
            log_error = log((waited_s + _LOG_OFFSET_S) / (amounts[resource] * seconds[resource] + _LOG_OFFSET_S))
            squared_errors[resource] += _ERROR_RATE * (min(log_error * log_error, 4.0) - squared_errors[resource])

    def _update(self, now: float) -> None:
        if self._drain_rates.update(now):
            self._blended = _blend_all(self._drain_rates.seconds, self._squared_errors)
            self._lane_blended = _blend_all(self._drain_rates.lane_seconds, self._squared_errors)
            for lane in self._evaluate_due(now):
                self._factors[lane] = self._factors_of(lane)

    def _factors_of(self, lane: Lane) -> list[QuantileFactors]:
        return _factors(self._errors[lane], self._corrections[lane].factor)

    def _evaluate_due(self, now: float) -> set[Lane]:
        """Evaluate predictions whose time is up; returns their lanes."""
        due, at_floor, evaluated = self._due, self._due_at_floor, set()
        for prediction in self._unscheduled:
            self._push_count += 1
            entry = (prediction.at + max(prediction.p90_s, FLOOR_S), self._push_count, prediction)
            if prediction.p90_s <= FLOOR_S and (not at_floor or at_floor[-1] < entry):
                at_floor.append(entry)
            else:
                heappush(due, entry)
        self._unscheduled.clear()
        while at_floor or due:
            is_at_floor = bool(at_floor) and (not due or at_floor[0] < due[0])
            if (at_floor[0] if is_at_floor else due[0])[0] > now:
                break
            at, _, prediction = at_floor.popleft() if is_at_floor else heappop(due)
            if not prediction.was_removed:
                self._evaluate(prediction, at)
                evaluated.add(prediction.lane)
        return evaluated

    def _evaluate(self, prediction: WaitPrediction, at: float) -> None:
        """The P90 of the prediction has passed."""
        waited, stated_s = prediction.waited_s, max(prediction.p90_s, FLOOR_S)
        held = waited is not None and waited <= stated_s
        # Predictions below the floor hold nearly always. If they counted, longer predictions would have to be too long
        # to compensate for the few that fail. The histogram counts them.
        if prediction.p90_s > FLOOR_S:
            self._corrections[prediction.lane].record(held, stated_s, at)
        if waited is not None and held:
            prediction.errors.add(_error(waited, prediction), waited, at)
        else:
            error = _error(stated_s, prediction) + _CENSORED_LOG_ERROR if waited is None else _error(waited, prediction)
            counted = prediction.errors.add(error, stated_s, at)
            if waited is None:
                prediction.counted = counted


def deadline_refusal(
    model: WaitModel, job: InferenceJob, prediction: WaitPrediction, now: float
) -> DeadlineInfeasible | None:
    """The refusal of a job that will almost certainly still be queued when its deadline passes, or None.

    It is refused when its P10 exceeds the deadline, so that nine in ten such jobs would expire in the queue: refusing a
    job that could have been served is worse than queueing one that expires, which costs no GPU time. With nothing ahead
    of it no wait is certain: rates may be those of an outage, and calls that are refused would never correct them.
    """
    if job.deadline is None or prediction.p10_s <= (left := job.deadline - now):
        return None
    if not prediction.ahead.jobs and left > 0:
        return None
    left = max(0.0, left)
    refusal = DeadlineInfeasible(
        f"lane {job.lane.name} predicts a queue wait of about {prediction.p50_s * 1000:.0f} ms; its deadline leaves "
        f"{left * 1000:.0f} ms",
        retry_after_s=model.retry_after(prediction, left),
    )
    refusal.predicted_wait_s = prediction.p50_s
    return refusal


def _error(waited_s: float, prediction: WaitPrediction) -> float:
    return log((waited_s + _LOG_OFFSET_S) / (prediction.estimate_s + _LOG_OFFSET_S))


def _factors(horizons: list[ErrorHistogram], correction: float) -> list[QuantileFactors]:
    evidence = [errors.evidence for errors in horizons]
    p10s, p50s = [errors.p10 for errors in horizons], [errors.p50 for errors in horizons]
    p90s = [errors.p90 * correction for errors in horizons]
    bounds = [_monotone_bounds(factors, evidence) for factors in (p10s, p50s, p90s)]
    return [
        QuantileFactors(
            errors,
            p10s[index],
            p50s[index],
            p90s[index],
            *(lower[index] for lower, _ in bounds),
            *(upper[index] for _, upper in bounds),
        )
        for index, errors in enumerate(horizons)
    ]


def _monotone_bounds(factors: list[float], evidence: list[float]) -> tuple[list[float], list[float]]:
    """Lower and upper bounds of a quantile in every horizon, so that it never falls from one horizon to the next.

    Where the nearer horizon predicts more for its longest wait than the farther one, both are bounded by a mean
    weighted by evidence, so that a rarely used horizon does not dominate.
    """
    lower, upper = [0.0] * len(factors), [inf] * len(factors)
    for index, horizon_s in enumerate(_HORIZONS_S):
        offset_s = horizon_s + _LOG_OFFSET_S
        nearer, farther = max(lower[index], offset_s * factors[index]), offset_s * factors[index + 1]
        if nearer > farther:
            weight, other = evidence[index], evidence[index + 1]
            nearer = max(lower[index], (nearer * weight + farther * other) / (weight + other))
            upper[index] = nearer
        lower[index + 1] = nearer
    return lower, upper


def _blend_all(of_lanes: list[list[SecondsPerUnit]], squared_errors: list[list[float]]) -> list[list[SecondsPerUnit]]:
    return [[_blended(seconds, squared_errors[lane]) for seconds in memories] for lane, memories in enumerate(of_lanes)]


def _blended(seconds: SecondsPerUnit, squared_errors: list[float]) -> SecondsPerUnit:
    """Seconds that each unit adds to the estimate, with resources weighted by how well they have predicted."""
    weights = [
        1.0 / (squared_error + 0.01) ** 2 if each > 0 else 0.0
        for each, squared_error in zip(seconds, squared_errors, strict=True)
    ]
    total = sum(weights, 0.0)
    if total <= 0:
        return UNKNOWN_RATES
    jobs, prompt, output = (each * weight / total for each, weight in zip(seconds, weights, strict=True))
    return (jobs, prompt, output)
