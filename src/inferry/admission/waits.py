"""How long a job offered now would wait to be admitted, and when a refused one should come back.

The point estimate is a fluid model. A job of lane L waits for what is queued in its lane and above, for what arrives
above it meanwhile, and for itself to fit. With capacity R measured while somebody waited, higher lanes taking H of it
and lanes below that wait owning a share s of it:

    W = min( (above + own) / (R (1 - s) - H),  own / (share of L · R) )

the second because a lane with a share is served however much arrives above it. W is computed in jobs, prompt tokens
and output tokens; each currency counts by how well it has predicted lately, so that whichever binds takes over.

Around it stand quantiles. The spread expected is that of a sum of admissions, which narrows with the root of the
number ahead, and a part that does not narrow; its multiple is learned, per lane and per depth (`calibration`).
Before anything has been measured a wait is predicted as zero: nobody is refused out of ignorance.

One model serves one group of workers, and has one owner.
"""

from collections.abc import Mapping
from math import exp, inf, log

from msgspec import Struct

from inferry.admission.calibration import Coverage, Threshold, weight_of
from inferry.admission.rates import NOTHING, Capacity, Load, Work
from inferry.domain.errors import DeadlineInfeasible, GatewayError
from inferry.domain.jobs import InferenceJob, Lane, LanePolicy

FLOOR_S = 0.05
"""Differences below this matter to nobody."""
SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 120.0
LONGEST_WAIT_S = 3600.0

_LANES = len(Lane)
_DEPTHS = 11
# One weight for all jobs of a depth: unequal ones would shift the quantile towards the jobs that count for more.
_WEIGHTS = (1.0, 1.0, *(weight_of(1.5 * 2**power) for power in range(_DEPTHS - 2)))
_SOFT_S = FLOOR_S / 5
"""Scores compare waits on a logarithmic scale that is linear below this."""
_STEADY_SPREAD = 0.15
_ERROR_RATE = 0.03
_LEAST_RATE = 0.02
"""Higher lanes leave at least this part of the capacity in the formula; what it says then is 'very long'."""


class Ahead(Struct, frozen=True):
    """What a job offered now finds: work queued per lane (index: the lane), and whether it has room at once."""

    queued: tuple[Work, ...] = (NOTHING,) * _LANES
    in_flight: Work = NOTHING
    has_room: bool = False


class Wait(Struct, frozen=True, gc=False):
    """Half of jobs wait no longer than `p50_s`, nine in ten no longer than `p90_s`.

    The rest is for `observe_wait`: what was predicted before calibration, and by which yardstick.
    """

    p50_s: float
    p90_s: float
    lane: Lane = Lane.P1
    center_s: float = 0.0
    by_currency: tuple[float, float, float] = (0.0, 0.0, 0.0)
    depth: int = 0


class _Calibration:
    """One quantile of one lane: what all queues share, and what each depth adds.

    Jobs that find room are a case of their own: they wait for nothing that a queue could tell about, and below zero
    there is nothing to follow.
    """

    __slots__ = ("_at", "_shared")

    def __init__(self, level: float, first: float) -> None:
        self._shared = Threshold(level, first)
        self._at = [Threshold(level, first, lowest=0.0), *(Threshold(level, 0.0) for _ in range(_DEPTHS - 1))]

    def value(self, depth: int) -> float:
        own = self._at[depth].value
        return self._shared.value + own if depth else own

    def learn(self, was_within: bool, depth: int) -> None:
        weight = _WEIGHTS[depth]
        self._at[depth].learn(was_within, weight)
        if depth:
            self._shared.learn(was_within, weight)


class WaitModel:
    """Predicts waits and learns from them. O(1) per call; no call waits or looks at a clock."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy]) -> None:
        self._shares = [lanes[lane].share if lane in lanes else 0.0 for lane in Lane]
        self._capacity = Capacity()
        self._loads = [Load() for _ in Lane]
        self._errors = [[0.25, 0.25, 0.25] for _ in Lane]
        self._p50 = [_Calibration(0.5, 0.0) for _ in Lane]
        self._p90 = [_Calibration(0.9, 1.28) for _ in Lane]
        self._judged = [0] * _LANES
        self._within = [0.0] * _LANES

    # -- what it says ------------------------------------------------------------------------------------------------

    def predict(self, lane: Lane, job: Work, ahead: Ahead, now: float) -> Wait:
        """The wait of `job`, offered to `lane` now."""
        jobs_ahead = sum(ahead.queued[higher].jobs for higher in range(lane + 1))
        if ahead.has_room and not jobs_ahead:
            depth, by_currency, center = 0, (0.0, 0.0, 0.0), 0.0
        else:
            depth = _depth_of(jobs_ahead)
            by_currency = self._fluid(lane, job, ahead, now)
            center = _weighted(by_currency, self._errors[lane])
        cv = self._capacity.step_cv
        spread = (_STEADY_SPREAD**2 + cv * cv / (jobs_ahead + 1)) ** 0.5
        p50 = _stretched(center, self._p50[lane].value(depth) * spread)
        p90 = _stretched(center, self._p90[lane].value(depth) * spread)
        return Wait(p50, max(p50, p90), lane, center, by_currency, depth)

    def retry_after(self, lane: Lane, job: Work, ahead: Ahead, now: float, *, within_s: float = 0.0) -> float:
        """Seconds until a job like this one would wait no longer than `within_s`, as things go.

        The backlog shrinks by what the capacity exceeds the load; where that seems to be nothing, half as fast as it is
        worked off.
        """
        excess = self.predict(lane, job, ahead, now).p50_s - within_s
        rate = self._capacity.jobs_per_s
        load = sum(self._loads[higher].per_s(now) for higher in range(lane + 1)) / rate if rate else 0.0
        # While a lane is backlogged it gets all there is, so its load alone does not tell how much arrives.
        shrinking = max(0.5, 1 - load)
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, excess / shrinking))

    def coverage(self, lane: Lane) -> Coverage:
        """How the P90 has held where it was above the floor. Recent jobs count for more."""
        return Coverage(self._judged[lane], self._within[lane])

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens admitted per second while somebody waited."""
        return self._capacity.prefill_tokens_per_s

    # -- what it learns ----------------------------------------------------------------------------------------------

    def observe_admitted(self, lane: Lane, work: Work, waited_s: float, now: float) -> None:
        """A job has been given to a worker, after so long in the queue. Voluntary holds do not count as waiting."""
        self._capacity.admitted(work, waited_s, now)
        self._loads[lane].add(work.jobs, now)

    def observe_wait(self, predicted: Wait, actual_s: float) -> None:
        """The wait of a job that was predicted has ended with admission. Cancelled and expired jobs teach nothing."""
        lane = predicted.lane
        if predicted.center_s > 0:
            errors = self._errors[lane]
            for currency, said in enumerate(predicted.by_currency):
                off = log((actual_s + _SOFT_S) / (said + _SOFT_S))
                errors[currency] += _ERROR_RATE * (min(off * off, 4.0) - errors[currency])
        held = actual_s <= predicted.p90_s
        self._p50[lane].learn(actual_s <= predicted.p50_s, predicted.depth)
        self._p90[lane].learn(held, predicted.depth)
        if predicted.p90_s > FLOOR_S:
            self._judged[lane] += 1
            rate = max(1 / 1000, 1 / self._judged[lane])
            self._within[lane] += rate * (held - self._within[lane])

    # -- the model ---------------------------------------------------------------------------------------------------

    def _fluid(self, lane: Lane, job: Work, ahead: Ahead, now: float) -> tuple[float, float, float]:
        capacity = self._capacity
        if not capacity.is_known:
            return (0.0, 0.0, 0.0)
        above = NOTHING
        for higher in range(lane):
            above = above.plus(ahead.queued[higher])
        own = ahead.queued[lane].plus(job)
        taken = sum(self._loads[higher].per_s(now) for higher in range(lane)) / capacity.jobs_per_s
        owed = sum(self._shares[lower] for lower in range(lane + 1, _LANES) if ahead.queued[lower].jobs)
        left = max(_LEAST_RATE, 1 - owed - taken)
        by_order = capacity.seconds_for(above.plus(own))
        share = self._shares[lane]
        by_share = capacity.seconds_for(own)
        # A lane without a share is served by order alone.
        slower = 1 / share if share else inf
        return (
            min(by_order[0] / left, by_share[0] * slower, LONGEST_WAIT_S),
            min(by_order[1] / left, by_share[1] * slower, LONGEST_WAIT_S),
            min(by_order[2] / left, by_share[2] * slower, LONGEST_WAIT_S),
        )


def infeasible(job: InferenceJob, wait: Wait, service_s: float, now: float) -> GatewayError | None:
    """The refusal of a job that would more likely than not miss its deadline, or None.

    `service_s` is how long it is expected to take once admitted, as far as the deadline covers that.
    """
    if job.deadline is None:
        return None
    left = job.deadline - now
    needed = wait.p50_s + service_s
    if needed <= left:
        return None
    return DeadlineInfeasible(
        f"lane {job.lane.name} needs about {needed * 1000:.0f} ms for this job "
        f"({wait.p50_s * 1000:.0f} ms of it in the queue); the deadline leaves {max(0.0, left) * 1000:.0f} ms",
        retry_after_s=min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, min(wait.p50_s, needed - left))),
    )


def _depth_of(jobs_ahead: float) -> int:
    """0 is kept for jobs that find room; 1 is an empty queue without room, then one more for every doubling."""
    return min(_DEPTHS - 1, 1 + int(jobs_ahead).bit_length())


def _weighted(by_currency: tuple[float, float, float], errors: list[float]) -> float:
    total = weights = 0.0
    for said, error in zip(by_currency, errors, strict=True):
        if said > 0:
            weight = 1 / (error + 0.01) ** 2
            total += weight * said
            weights += weight
    return total / weights if weights else 0.0


def _stretched(center: float, logarithm: float) -> float:
    return min(LONGEST_WAIT_S, max(0.0, (center + _SOFT_S) * exp(min(12.0, logarithm)) - _SOFT_S))
