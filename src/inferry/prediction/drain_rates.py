"""How fast queues empty, measured in three resources at once: jobs, prompt tokens and output tokens.

The only owner of queue rates: wait prediction, queue limits and retry times all read these. Which resource binds
depends on the engine and the load: sequences, KV or prefill. The wait model compares what each would have predicted.

A job of lane L leaves in one of two ways. Either everything before it leaves: what is queued above L, and in L before
the job. That shrinks by what is sent from those lanes and grows by arrivals above L, since live jobs overtake a waiting
batch job. Or what is before it in L itself leaves, because a lane with a share is served whatever is queued above it.
Its wait is the shorter of

    all before it / (sent at or above L - arrived above L)    and    before it in L / sent from L

Sent amounts count over the time in which jobs waited: without a queue they measure arrivals, not capacity.

Rates have three time constants, because short waits follow the last seconds and long waits the last minute. Events only
add to counters; every UPDATE_INTERVAL_S these are folded in and the rates of all lanes are computed.
"""

from math import exp, inf
from typing import Final

from inferry.domain.lanes import Lane
from inferry.domain.queue_depth import QueueDepth

UPDATE_INTERVAL_S: Final = 0.25
TIME_CONSTANTS_S = (4.0, 16.0, 64.0)
"""Seconds after which a count weighs 1/e."""
MIN_QUEUED_S: Final = 0.005
"""A job that leaves sooner after its arrival was not delayed, and proves nothing about capacity."""
MIN_NET_FRACTION: Final = 0.05
"""At least this part of the sent rate is assumed to remain after arrivals above; the wait is then very long."""

_LANES: Final = len(Lane)
_RESOURCES: Final = range(3)

SecondsPerUnit = tuple[float, float, float]
"""For each job, prompt token and output token."""
UNKNOWN_RATES: SecondsPerUnit = (0.0, 0.0, 0.0)


class _DecayingRate:
    """Exponentially decaying amounts over decaying time."""

    __slots__ = ("amounts", "seconds", "time_constant_s")

    def __init__(self, time_constant_s: float) -> None:
        self.time_constant_s = time_constant_s
        self.seconds = 0.0
        self.amounts = [0.0, 0.0, 0.0]

    def fold(self, amounts: list[float], seconds: float) -> None:
        decay = exp(-seconds / self.time_constant_s)
        # The integral of the decay, so that a long pause counts for no more than one time constant.
        self.seconds = self.seconds * decay + self.time_constant_s * (1.0 - decay)
        self.amounts = [old * decay + new for old, new in zip(self.amounts, amounts, strict=True)]

    def per_s(self, resource: int) -> float:
        return self.amounts[resource] / self.seconds if self.seconds > 0 else 0.0


class _BusyTimer:
    """How long jobs have waited since this was last read."""

    __slots__ = ("_elapsed_s", "_is_busy", "_since")

    def __init__(self) -> None:
        self._is_busy = False
        self._since = 0.0
        self._elapsed_s = 0.0

    def set(self, is_busy: bool, now: float) -> None:
        """Jobs wait from now on, or no longer."""
        if is_busy is not self._is_busy:
            self._is_busy = is_busy
            if is_busy:
                self._since = now
            else:
                self._elapsed_s += now - self._since

    def take_elapsed_s(self, now: float) -> float:
        if self._is_busy:
            self._elapsed_s += now - self._since
            self._since = now
        elapsed_s, self._elapsed_s = self._elapsed_s, 0.0
        return max(0.0, elapsed_s)


class DrainRates:
    """Seconds per unit of what is before a job, for every lane and time constant.

    `seconds[lane][horizon]` is for all that is before the job, `lane_seconds[lane][horizon]` for its own lane. A
    resource of which nothing was sent while jobs waited has zero. Queue depth is read, after it has changed.
    """

    __slots__ = (
        "_arrival_rates",
        "_busy",
        "_depth",
        "_drain_rates_at_or_above",
        "_lane_busy",
        "_lane_drain_rates",
        "_queued_amounts",
        "_sent_amounts",
        "_updated_at",
        "lane_seconds",
        "next_update_at",
        "seconds",
    )

    def __init__(self, depth: QueueDepth) -> None:
        self._depth = depth
        self.seconds: list[list[SecondsPerUnit]] = [[UNKNOWN_RATES] * len(TIME_CONSTANTS_S) for _ in Lane]
        self.lane_seconds: list[list[SecondsPerUnit]] = [[UNKNOWN_RATES] * len(TIME_CONSTANTS_S) for _ in Lane]
        self._busy = [_BusyTimer() for _ in Lane]
        self._lane_busy = [_BusyTimer() for _ in Lane]
        self._queued_amounts = _zeros()
        self._sent_amounts = _zeros()
        self._arrival_rates = _decaying_rates()
        self._drain_rates_at_or_above = _decaying_rates()
        self._lane_drain_rates = _decaying_rates()
        self._updated_at: float | None = None
        self.next_update_at = -inf

    def joined(self, lane: Lane, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A job has joined the queue."""
        self.depth_changed(lane, now)
        _add(self._queued_amounts[lane], prompt_tokens, output_tokens)

    def sent(self, lane: Lane, prompt_tokens: int, output_tokens: int, waited_s: float, now: float) -> None:
        """A job was given to a worker after `waited_s` in the queue."""
        self.depth_changed(lane, now)
        if waited_s >= MIN_QUEUED_S:
            _add(self._sent_amounts[lane], prompt_tokens, output_tokens)

    def depth_changed(self, lane: Lane, now: float) -> None:
        """The queue depth of the lane has changed."""
        depth = self._depth
        self._lane_busy[lane].set(depth.jobs[lane] > 0, now)
        for lower in range(lane, _LANES):
            self._busy[lower].set(depth.at_or_above[lower] > 0, now)

    def update(self, now: float) -> bool:
        """Fold in what was counted, from `next_update_at` on; returns whether rates were computed."""
        if now < self.next_update_at:
            return False
        last, self._updated_at, self.next_update_at = self._updated_at, now, now + UPDATE_INTERVAL_S
        if last is None:
            return False
        elapsed = now - last
        for lane in range(_LANES):
            busy_s, own_busy_s = self._busy[lane].take_elapsed_s(now), self._lane_busy[lane].take_elapsed_s(now)
            sent = [sum(self._sent_amounts[upper][resource] for upper in range(lane + 1)) for resource in _RESOURCES]
            for horizon in range(len(TIME_CONSTANTS_S)):
                self._arrival_rates[lane][horizon].fold(self._queued_amounts[lane], elapsed)
                if busy_s:
                    self._drain_rates_at_or_above[lane][horizon].fold(sent, busy_s)
                if own_busy_s:
                    self._lane_drain_rates[lane][horizon].fold(self._sent_amounts[lane], own_busy_s)
        self._queued_amounts = _zeros()
        self._sent_amounts = _zeros()
        for lane in range(_LANES):
            for horizon in range(len(TIME_CONSTANTS_S)):
                self.seconds[lane][horizon] = self._seconds(lane, horizon)
                self.lane_seconds[lane][horizon] = self._lane_seconds(lane, horizon)
        return True

    def net_drain_fraction(self, lane: Lane) -> float:
        """The part of the sent rate at or above the lane that arrivals there do not offset."""
        sent = self._drain_rates_at_or_above[lane][1].per_s(0)
        joined = sum([self._arrival_rates[upper][1].per_s(0) for upper in range(lane + 1)], 0.0)
        return 1.0 - joined / sent if sent > 0 else 1.0

    def best_case_s_per_job(self, lane: Lane) -> float:
        """Seconds per job at or above the lane without arrivals in higher lanes; 0 where nothing was measured."""
        sent = self._drain_rates_at_or_above[lane][1].per_s(0)
        return 1.0 / sent if sent > 0 else 0.0

    def _seconds(self, lane: int, horizon: int) -> SecondsPerUnit:
        jobs, prompt, output = (self._seconds_per(lane, horizon, resource) for resource in _RESOURCES)
        return (jobs, prompt, output)

    def _seconds_per(self, lane: int, horizon: int, resource: int) -> float:
        sent = self._drain_rates_at_or_above[lane][horizon].per_s(resource)
        if sent <= 0:
            return 0.0
        arrivals_above = sum([self._arrival_rates[upper][horizon].per_s(resource) for upper in range(lane)], 0.0)
        return 1.0 / max(sent - arrivals_above, MIN_NET_FRACTION * sent)

    def _lane_seconds(self, lane: int, horizon: int) -> SecondsPerUnit:
        own = [self._lane_drain_rates[lane][horizon].per_s(resource) for resource in _RESOURCES]
        jobs, prompt, output = (1.0 / each if each > 0 else 0.0 for each in own)
        return (jobs, prompt, output)


def _zeros() -> list[list[float]]:
    return [[0.0, 0.0, 0.0] for _ in Lane]


def _decaying_rates() -> list[list[_DecayingRate]]:
    return [[_DecayingRate(time_constant_s) for time_constant_s in TIME_CONSTANTS_S] for _ in Lane]


def _add(amounts: list[float], prompt_tokens: int, output_tokens: int) -> None:
    amounts[0] += 1
    amounts[1] += prompt_tokens
    amounts[2] += output_tokens
