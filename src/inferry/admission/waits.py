"""How long a job offered now would wait until it is sent to a worker, and when a refused one should come back.

The middle estimate is a fluid model: what stands before the job, times the seconds each unit of it takes (`rates`), in
jobs, prompt tokens and output tokens; each currency counts by how well it has predicted lately, so that whichever binds
takes over. A lane with a share may be served before all that is above it: then only what stands before the job in its
own lane counts. Around it stand quantiles learned from how far waits were from it (`calibration`), for every lane, and
apart for short and long waits: those differ by more than a factor.

Every statement is judged when its time is up: was the job sent by then? Judging jobs as they go would hear of the short
waits first and of the long ones too late, and always expect too little while queues grow. Before anything has been
measured a wait is predicted as nearly zero: nobody is refused out of ignorance.

One model serves one scheduler and has one owner, who calls `predict`, then `queued` if the job was let in, then `sent`
or `left` when it is not queued any more.
"""

from bisect import bisect_right
from heapq import heappop, heappush
from math import inf, log

from inferry.admission.calibration import Correction, Errors, lanes_of_errors
from inferry.admission.rates import NOTHING_KNOWN, Drain, Seconds
from inferry.admission.told import Stretch, Told
from inferry.admission.values import Coverage
from inferry.domain.errors import DeadlineInfeasible
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ahead

FLOOR_S = 0.05
"""Differences below this matter to nobody."""
SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 120.0
LONGEST_WAIT_S = 3600.0

NOBODY = Ahead()
_HORIZONS_S = (0.1, 0.4, 1.6, 6.4, 25.6)
_PRIORS = ((0.0, 1.0), (0.0, 0.8), (0.05, 0.5), (0.05, 0.4), (0.05, 0.3), (0.05, 0.3))
"""Middle and spread of log(actual / predicted) before anything is known: long waits average over more."""
_NEAR_S, _FAR_S = 2.0, 8.0
"""Waits below the one are told by the shortest memory, beyond the other by the longest."""
_SOFT_S = 0.01
"""Errors compare waits on a logarithmic scale that is linear below this."""
_STILL_THERE = 0.35
"""Until it is known how long it takes, a wait beyond its P90 counts as longer by this much (of a logarithm)."""
_ERROR_RATE = 0.03
_LEAST_SHRINKING = 0.25


class WaitModel:
    """Predicts waits and learns from them. O(1) per job but for a heap; no call waits or looks at a clock."""

    def __init__(self) -> None:
        self._drain = Drain()
        self._errors = lanes_of_errors(_PRIORS)
        self._corrections = [Correction() for _ in Lane]
        self._squares = [[0.25, 0.25, 0.25] for _ in Lane]
        self._mixed: list[list[Seconds]] = [[NOTHING_KNOWN] * 3 for _ in Lane]
        self._own_mixed: list[list[Seconds]] = [[NOTHING_KNOWN] * 3 for _ in Lane]
        self._stretches = [self._stretches_of(lane) for lane in Lane]
        self._young: list[Told] = []
        self._due: list[tuple[float, int, Told]] = []
        self._pushed = 0

    # -- what it says ------------------------------------------------------------------------------------------------

    def is_behind_somebody(self, lane: Lane) -> bool:
        """Whether a job of the lane would find anybody queued at or above it."""
        return self._drain.waiting(lane) > 0

    def predict(self, lane: Lane, prompt_tokens: int, output_tokens: int, ahead: Ahead, now: float) -> Told:
        """The wait of a job with so many expected tokens, offered now behind what is `ahead`. Changes nothing.

        Between two beats the same job is never told to wait less where more is ahead of it.
        """
        drain, above = self._drain, self._drain.above[lane]
        amounts = (ahead.jobs + 1, ahead.prompt_tokens + prompt_tokens, ahead.output_tokens + output_tokens)
        in_lane = amounts
        if above[0]:
            # Never less than itself: what is above may be counted a moment later.
            in_lane = (
                max(1, amounts[0] - above[0]),
                max(prompt_tokens, amounts[1] - above[1]),
                max(output_tokens, amounts[2] - above[2]),
            )
        memory = 1
        middle, by_share = self._wait(lane, memory, amounts, in_lane)
        if middle < _NEAR_S:
            memory = 0
            middle, by_share = self._wait(lane, memory, amounts, in_lane)
            if middle > _NEAR_S:
                middle = _NEAR_S
        elif middle > _FAR_S:
            memory = 2
            middle, by_share = self._wait(lane, memory, amounts, in_lane)
            middle = min(LONGEST_WAIT_S, max(_FAR_S, middle))
        stretch = self._stretches[lane][bisect_right(_HORIZONS_S, middle)]
        soft = middle + _SOFT_S
        # Comparisons instead of min and max: these lines run for every job.
        p10, p50, p90 = soft * stretch.p10, soft * stretch.p50, soft * stretch.p90
        if p10 < stretch.least_p10:
            p10 = stretch.least_p10
        elif p10 > stretch.most_p10:
            p10 = stretch.most_p10
        if p50 < stretch.least_p50:
            p50 = stretch.least_p50
        elif p50 > stretch.most_p50:
            p50 = stretch.most_p50
        if p90 < stretch.least_p90:
            p90 = stretch.least_p90
        elif p90 > stretch.most_p90:
            p90 = stretch.most_p90
        if amounts[0] == 1:
            # Nobody is ahead: how much room there is decides, of which the queue says nothing.
            stretch = self._stretches[lane][0]
            if p10 > (own := soft * stretch.p10):
                p10 = own
            if p50 > (own := soft * stretch.p50):
                p50 = own
            if p90 > (own := soft * stretch.p90):
                p90 = own
        p10, p50, p90 = p10 - _SOFT_S, p50 - _SOFT_S, p90 - _SOFT_S
        if p10 < 0.0:
            p10 = 0.0
        if p50 < p10:
            p50 = p10
        return Told(
            p50,
            p90 if p90 > p50 else p50,
            p10,
            lane,
            now,
            middle,
            stretch.errors,
            ahead,
            prompt_tokens,
            output_tokens,
            in_lane if by_share else amounts,
            (drain.own_seconds if by_share else drain.seconds)[lane][memory],
        )

    def _wait(
        self, lane: Lane, memory: int, amounts: tuple[int, int, int], in_lane: tuple[int, int, int]
    ) -> tuple[float, bool]:
        """Until all before it has gone, or what is before it in its lane if that is sooner; whether it is."""
        jobs, prompt, output = amounts
        by_job, by_prompt, by_output = self._mixed[lane][memory]
        through = jobs * by_job + prompt * by_prompt + output * by_output
        if lane:
            jobs, prompt, output = in_lane
            by_job, by_prompt, by_output = self._own_mixed[lane][memory]
            by_share = jobs * by_job + prompt * by_prompt + output * by_output
            if 0.0 < by_share < through:
                return by_share, True
        return through, False

    def retry_after(self, told: Told, within_s: float | None = None) -> float:
        """Seconds until a job that was told this should come back, between one and two minutes at most.

        Without `within_s`: when what is before it now has gone. With it: when the median wait of a job like this will
        have come down to that. What is before it shrinks by what is sent beyond what comes; where that seems to be
        nothing, a quarter as fast as it is worked off, since who is refused comes later.
        """
        seconds = told.p50_s
        if within_s is not None:
            seconds = (seconds - within_s) / max(_LEAST_SHRINKING, self._drain.shrinking(told.lane))
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, seconds))

    def each_s(self, told: Told) -> tuple[float, float]:
        """How long a job that is before the one that was told this takes to go: as things are, and if nobody came who
        goes before the lane. Zero where nothing is known."""
        if told.middle_s <= 0:
            return 0.0, 0.0
        now_s = told.p50_s / told.amounts[0]
        at_best_s = self._drain.seconds_at_best(told.lane)
        return now_s, min(now_s, at_best_s) if at_best_s else now_s

    def coverage(self, lane: Lane) -> Coverage:
        """How the P90 has held where it was above the floor. Recent jobs count for more."""
        correction = self._corrections[lane]
        return Coverage(correction.jobs, correction.within)

    def coverages(self) -> dict[Lane, float]:
        """The part that held, for every lane in which something was judged."""
        return {lane: found.within for lane in Lane if (found := self.coverage(lane)).jobs}

    # -- what it learns ----------------------------------------------------------------------------------------------

    def queued(self, told: Told, now: float) -> None:
        """The job was let in."""
        self._drain.came(told.lane, told.prompt_tokens, told.output_tokens, now)
        self._young.append(told)
        if now >= self._drain.next_beat_at:
            self._beat(now)

    def sent(self, told: Told, now: float) -> None:
        """The job was given to a worker."""
        waited = told.waited_s = now - told.at
        self._drain.sent(told.lane, told.prompt_tokens, told.output_tokens, waited, now)
        if told.counted is not None:
            told.errors.move(told.counted, _error(waited, told))
        if waited > FLOOR_S:
            self._compare_currencies(told, waited)
        if now >= self._drain.next_beat_at:
            self._beat(now)

    def left(self, told: Told, now: float) -> None:
        """The job left the queue without being sent: cancelled or expired. Its wait teaches nothing."""
        told.has_left = True
        self._drain.left(told.lane, told.prompt_tokens, told.output_tokens, now)
        if now >= self._drain.next_beat_at:
            self._beat(now)

    def _compare_currencies(self, told: Told, waited_s: float) -> None:
        squares, seconds, amounts = self._squares[told.lane], told.seconds, told.amounts
        for currency in range(3):
            off = log((waited_s + _SOFT_S) / (amounts[currency] * seconds[currency] + _SOFT_S))
            squares[currency] += _ERROR_RATE * (min(off * off, 4.0) - squares[currency])

    def _beat(self, now: float) -> None:
        if self._drain.beat(now):
            self._mixed = _all_mixed(self._drain.seconds, self._squares)
            self._own_mixed = _all_mixed(self._drain.own_seconds, self._squares)
            for lane in self._judge_what_is_due(now):
                self._stretches[lane] = self._stretches_of(lane)

    def _stretches_of(self, lane: Lane) -> list[Stretch]:
        return _stretches(self._errors[lane], self._corrections[lane].factor)

    def _judge_what_is_due(self, now: float) -> set[Lane]:
        """Lanes of which something was learned."""
        due, judged = self._due, set()
        for told in self._young:
            self._pushed += 1
            heappush(due, (told.at + max(told.p90_s, FLOOR_S), self._pushed, told))
        self._young.clear()
        while due and due[0][0] <= now:
            at, _, told = heappop(due)
            if not told.has_left:
                self._judge(told, at)
                judged.add(told.lane)
        return judged

    def _judge(self, told: Told, at: float) -> None:
        """The time that was stated for the job is up."""
        waited, stated = told.waited_s, max(told.p90_s, FLOOR_S)
        held = waited is not None and waited <= stated
        # Jobs that are told less than the floor are kept by whatever is said, nearly all of them: what is said to the
        # others would have to be too much to make up for the few that are not. The histogram hears of these.
        if told.p90_s > FLOOR_S:
            self._corrections[told.lane].judge(held, stated, at)
        if waited is not None and held:
            told.errors.add(_error(waited, told), waited, at)
        else:
            error = _error(stated, told) + _STILL_THERE if waited is None else _error(waited, told)
            counted = told.errors.add(error, stated, at)
            if waited is None:
                told.counted = counted


def infeasible(model: WaitModel, job: InferenceJob, told: Told, now: float) -> DeadlineInfeasible | None:
    """The refusal of a job that will almost certainly still be queued when its deadline passes, or None.

    It is refused when its P10 breaks the deadline, that is when nine in ten jobs like it would expire in the queue: to
    refuse a job that could have been served is worse than to queue one that expires, which costs nobody a GPU second.
    """
    if job.deadline is None or told.p10_s <= (left := job.deadline - now):
        return None
    left = max(0.0, left)
    refusal = DeadlineInfeasible(
        f"lane {job.lane.name} would keep this job queued for about {told.p50_s * 1000:.0f} ms; its deadline leaves "
        f"{left * 1000:.0f} ms",
        retry_after_s=model.retry_after(told, left),
    )
    refusal.predicted_wait_s = told.p50_s
    return refusal


def _error(waited_s: float, told: Told) -> float:
    return log((waited_s + _SOFT_S) / (told.middle_s + _SOFT_S))


def _stretches(horizons: list[Errors], correction: float) -> list[Stretch]:
    evidence = [errors.evidence for errors in horizons]
    p10s, p50s = [errors.p10 for errors in horizons], [errors.p50 for errors in horizons]
    p90s = [errors.p90 * correction for errors in horizons]
    ends = [_joined(factors, evidence) for factors in (p10s, p50s, p90s)]
    return [
        Stretch(
            errors,
            p10s[place],
            p50s[place],
            p90s[place],
            *(least[place] for least, _ in ends),
            *(most[place] for _, most in ends),
        )
        for place, errors in enumerate(horizons)
    ]


def _joined(factors: list[float], evidence: list[float]) -> tuple[list[float], list[float]]:
    """What a quantile is at least and at most in every horizon, so that it never falls from one to the next.

    Where the nearer would tell more for its longest wait than the farther for the same, they meet in between, closer to
    the one that has seen more. A horizon that is rarely asked about must not rule the others.
    """
    least, most = [0.0] * len(factors), [inf] * len(factors)
    for place, longest_s in enumerate(_HORIZONS_S):
        soft = longest_s + _SOFT_S
        nearer, farther = max(least[place], soft * factors[place]), soft * factors[place + 1]
        if nearer > farther:
            weight, other = evidence[place], evidence[place + 1]
            nearer = max(least[place], (nearer * weight + farther * other) / (weight + other))
            most[place] = nearer
        least[place + 1] = nearer
    return least, most


def _all_mixed(of_lanes: list[list[Seconds]], squares: list[list[float]]) -> list[list[Seconds]]:
    return [[_mixed(seconds, squares[lane]) for seconds in memories] for lane, memories in enumerate(of_lanes)]


def _mixed(seconds: Seconds, squares: list[float]) -> Seconds:
    """What each unit adds to the prediction, when currencies count by how well they have predicted."""
    weights = [1.0 / (square + 0.01) ** 2 if each > 0 else 0.0 for each, square in zip(seconds, squares, strict=True)]
    total = sum(weights, 0.0)
    if total <= 0:
        return NOTHING_KNOWN
    jobs, prompt, output = (each * weight / total for each, weight in zip(seconds, weights, strict=True))
    return (jobs, prompt, output)
