"""How fast queues empty, measured in three currencies at once: jobs, prompt tokens and output tokens.

Which of them binds depends on the engine and the hour: sequences, KV or prefill. Nobody is asked; whoever predicts
waits compares what each currency would have said.

There are two ways for a job of lane L to go. Either everything before it goes: what is queued above L, and in L before
the job. That shrinks by what is sent from those lanes and grows by what comes into the lanes above: while a batch job
waits, live jobs overtake it. Or what is before it in L itself goes, because a lane with a share is served however much
there is above it. So it waits for the sooner of

    all before it / (sent at or above L - came above L)    and    before it in L / sent from L

each a second. What was sent is counted over the time in which somebody waited: when nobody does, it says how much
arrives and nothing about how much could go.

Rates are kept with three memories, since the next minute is best told by the last and the next second by the last few.
Events only add to counters; once in a beat these are folded in and the answers for all lanes are made ready.
"""

from math import exp, inf

from inferry.domain.lanes import Lane

UPDATE_INTERVAL_S = 0.25
TIME_CONSTANTS_S = (4.0, 16.0, 64.0)
"""Seconds after which what was counted weighs a third."""
MIN_QUEUED_S = 0.005
"""A job that leaves sooner after its arrival was not held up by anybody, and proves nothing about capacity."""
MIN_NET_FRACTION = 0.05
"""Whatever arrives above, at least this part of what is sent is taken to come through: what follows is 'very long'."""

_LANES = len(Lane)
_RESOURCES = range(3)

SecondsPerUnit = tuple[float, float, float]
"""For each job, prompt token and output token."""
UNKNOWN_RATES: SecondsPerUnit = (0.0, 0.0, 0.0)


class _DecayingRate:
    """Amounts over a time that may stand still, fading together."""

    __slots__ = ("amounts", "seconds", "time_constant_s")

    def __init__(self, time_constant_s: float) -> None:
        self.time_constant_s = time_constant_s
        self.seconds = 0.0
        self.amounts = [0.0, 0.0, 0.0]

    def fold(self, amounts: list[float], seconds: float) -> None:
        decay = exp(-seconds / self.time_constant_s)
        # The integral of the fading itself, so that a long pause counts for no more than a memory.
        self.seconds = self.seconds * decay + self.time_constant_s * (1.0 - decay)
        self.amounts = [old * decay + new for old, new in zip(self.amounts, amounts, strict=True)]

    def per_s(self, resource: int) -> float:
        return self.amounts[resource] / self.seconds if self.seconds > 0 else 0.0


class _BusyTimer:
    """How long somebody has been waiting, since this was last asked. `waiting` counts who, `since` is when it began."""

    __slots__ = ("_elapsed_s", "since", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.since = 0.0
        self._elapsed_s = 0.0

    def stop(self, now: float) -> None:
        """Nobody waits any more."""
        self._elapsed_s += now - self.since

    def take_elapsed_s(self, now: float) -> float:
        if self.waiting:
            self._elapsed_s += now - self.since
            self.since = now
        elapsed_s, self._elapsed_s = self._elapsed_s, 0.0
        return max(0.0, elapsed_s)


class DrainRates:
    """Seconds that a unit of what stands before a job takes to go, for every lane and memory.

    `seconds[lane][memory]` is for all that is before it, `lane_seconds[lane][memory]` for what is in its own lane. They
    are zero for a currency of which nothing has been sent while somebody waited. `above[lane]` is what is queued in
    better lanes: jobs, prompt and output tokens.
    """

    __slots__ = (
        "_arrival_rates",
        "_busy",
        "_drain_rates_at_or_above",
        "_lane_busy",
        "_lane_drain_rates",
        "_queued_amounts",
        "_sent_amounts",
        "_timers_by_lane",
        "_updated_at",
        "lane_seconds",
        "next_update_at",
        "queued_above",
        "seconds",
    )

    def __init__(self) -> None:
        self.seconds: list[list[SecondsPerUnit]] = [[UNKNOWN_RATES] * len(TIME_CONSTANTS_S) for _ in Lane]
        self.lane_seconds: list[list[SecondsPerUnit]] = [[UNKNOWN_RATES] * len(TIME_CONSTANTS_S) for _ in Lane]
        self.queued_above = [[0, 0, 0] for _ in Lane]
        self._busy = [_BusyTimer() for _ in Lane]
        self._lane_busy = [_BusyTimer() for _ in Lane]
        # Where a job of each lane counts: what comes for P0 stands before everybody.
        self._timers_by_lane = [(*self._busy[lane:], self._lane_busy[lane]) for lane in range(_LANES)]
        self._queued_amounts = _zeros()
        self._sent_amounts = _zeros()
        self._arrival_rates = _decaying_rates()
        self._drain_rates_at_or_above = _decaying_rates()
        self._lane_drain_rates = _decaying_rates()
        self._updated_at: float | None = None
        self.next_update_at = -inf

    def waiting(self, lane: Lane) -> int:
        """Jobs queued at or above the lane."""
        return self._busy[lane].waiting

    def joined(self, lane: Lane, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A job has joined the queue."""
        for busy in self._timers_by_lane[lane]:
            if not busy.waiting:
                busy.since = now
            busy.waiting += 1
        _add(self._queued_amounts[lane], prompt_tokens, output_tokens)
        for queued_above in self.queued_above[lane + 1 :]:
            queued_above[0] += 1
            queued_above[1] += prompt_tokens
            queued_above[2] += output_tokens

    def left(self, lane: Lane, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A job has left the queue without being sent."""
        for busy in self._timers_by_lane[lane]:
            busy.waiting -= 1
            if not busy.waiting:
                busy.stop(now)
        for queued_above in self.queued_above[lane + 1 :]:
            queued_above[0] -= 1
            queued_above[1] -= prompt_tokens
            queued_above[2] -= output_tokens

    def sent(self, lane: Lane, prompt_tokens: int, output_tokens: int, waited_s: float, now: float) -> None:
        """A job has been given to a worker, after so long in the queue."""
        self.left(lane, prompt_tokens, output_tokens, now)
        if waited_s >= MIN_QUEUED_S:
            _add(self._sent_amounts[lane], prompt_tokens, output_tokens)

    def update(self, now: float) -> bool:
        """Fold in what was counted, if it is time (`next_update_at`); say whether it was."""
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
        """The part of what is sent at or above the lane that is not made up for by what comes there."""
        sent = self._drain_rates_at_or_above[lane][1].per_s(0)
        joined = sum([self._arrival_rates[upper][1].per_s(0) for upper in range(lane + 1)], 0.0)
        return 1.0 - joined / sent if sent > 0 else 1.0

    def best_case_s_per_job(self, lane: Lane) -> float:
        """Seconds that a job at or above the lane takes to go, if no better ones came; 0 where nothing is known."""
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
