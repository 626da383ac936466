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

BEAT_S = 0.25
MEMORIES_S = (4.0, 16.0, 64.0)
"""Seconds after which what was counted weighs a third."""
HELD_UP_S = 0.005
"""A job that leaves sooner after its arrival was not held up by anybody, and proves nothing about capacity."""
LEAST_NET = 0.05
"""Whatever arrives above, at least this part of what is sent is taken to come through: what follows is 'very long'."""

_LANES = len(Lane)
_CURRENCIES = range(3)

Seconds = tuple[float, float, float]
"""For each job, prompt token and output token."""
NOTHING_KNOWN: Seconds = (0.0, 0.0, 0.0)


class _Flow:
    """Amounts over a time that may stand still, fading together."""

    __slots__ = ("amounts", "memory_s", "seconds")

    def __init__(self, memory_s: float) -> None:
        self.memory_s = memory_s
        self.seconds = 0.0
        self.amounts = [0.0, 0.0, 0.0]

    def fold(self, amounts: list[float], seconds: float) -> None:
        keep = exp(-seconds / self.memory_s)
        # The integral of the fading itself, so that a long pause counts for no more than a memory.
        self.seconds = self.seconds * keep + self.memory_s * (1.0 - keep)
        self.amounts = [old * keep + new for old, new in zip(self.amounts, amounts, strict=True)]

    def per_s(self, currency: int) -> float:
        return self.amounts[currency] / self.seconds if self.seconds > 0 else 0.0


class _Busy:
    """How long somebody has been waiting, since this was last asked. `waiting` counts who, `since` is when it began."""

    __slots__ = ("_sum", "since", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.since = 0.0
        self._sum = 0.0

    def ended(self, now: float) -> None:
        """Nobody waits any more."""
        self._sum += now - self.since

    def take(self, now: float) -> float:
        if self.waiting:
            self._sum += now - self.since
            self.since = now
        taken, self._sum = self._sum, 0.0
        return max(0.0, taken)


class Drain:
    """Seconds that a unit of what stands before a job takes to go, for every lane and memory.

    `seconds[lane][memory]` is for all that is before it, `own_seconds[lane][memory]` for what is in its own lane. They
    are zero for a currency of which nothing has been sent while somebody waited. `above[lane]` is what is queued in
    better lanes: jobs, prompt and output tokens.
    """

    __slots__ = (
        "_beat_at",
        "_busy",
        "_came",
        "_came_flows",
        "_concerned",
        "_own_busy",
        "_own_flows",
        "_sent",
        "_sent_flows",
        "above",
        "next_beat_at",
        "own_seconds",
        "seconds",
    )

    def __init__(self) -> None:
        self.seconds: list[list[Seconds]] = [[NOTHING_KNOWN] * len(MEMORIES_S) for _ in Lane]
        self.own_seconds: list[list[Seconds]] = [[NOTHING_KNOWN] * len(MEMORIES_S) for _ in Lane]
        self.above = [[0, 0, 0] for _ in Lane]
        self._busy = [_Busy() for _ in Lane]
        self._own_busy = [_Busy() for _ in Lane]
        # Where a job of each lane counts: what comes for P0 stands before everybody.
        self._concerned = [(*self._busy[lane:], self._own_busy[lane]) for lane in range(_LANES)]
        self._came = _zeros()
        self._sent = _zeros()
        self._came_flows = _flows()
        self._sent_flows = _flows()
        self._own_flows = _flows()
        self._beat_at: float | None = None
        self.next_beat_at = -inf

    def waiting(self, lane: Lane) -> int:
        """Jobs queued at or above the lane."""
        return self._busy[lane].waiting

    def came(self, lane: Lane, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A job has joined the queue."""
        for busy in self._concerned[lane]:
            if not busy.waiting:
                busy.since = now
            busy.waiting += 1
        _add(self._came[lane], prompt_tokens, output_tokens)
        for above in self.above[lane + 1 :]:
            above[0] += 1
            above[1] += prompt_tokens
            above[2] += output_tokens

    def left(self, lane: Lane, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A job has left the queue without being sent."""
        for busy in self._concerned[lane]:
            busy.waiting -= 1
            if not busy.waiting:
                busy.ended(now)
        for above in self.above[lane + 1 :]:
            above[0] -= 1
            above[1] -= prompt_tokens
            above[2] -= output_tokens

    def sent(self, lane: Lane, prompt_tokens: int, output_tokens: int, waited_s: float, now: float) -> None:
        """A job has been given to a worker, after so long in the queue."""
        self.left(lane, prompt_tokens, output_tokens, now)
        if waited_s >= HELD_UP_S:
            _add(self._sent[lane], prompt_tokens, output_tokens)

    def beat(self, now: float) -> bool:
        """Fold in what was counted, if it is time (`next_beat_at`); say whether it was."""
        if now < self.next_beat_at:
            return False
        last, self._beat_at, self.next_beat_at = self._beat_at, now, now + BEAT_S
        if last is None:
            return False
        elapsed = now - last
        for lane in range(_LANES):
            busy_s, own_busy_s = self._busy[lane].take(now), self._own_busy[lane].take(now)
            sent = [sum(self._sent[upper][currency] for upper in range(lane + 1)) for currency in _CURRENCIES]
            for memory in range(len(MEMORIES_S)):
                self._came_flows[lane][memory].fold(self._came[lane], elapsed)
                if busy_s:
                    self._sent_flows[lane][memory].fold(sent, busy_s)
                if own_busy_s:
                    self._own_flows[lane][memory].fold(self._sent[lane], own_busy_s)
        self._came = _zeros()
        self._sent = _zeros()
        for lane in range(_LANES):
            for memory in range(len(MEMORIES_S)):
                self.seconds[lane][memory] = self._seconds(lane, memory)
                self.own_seconds[lane][memory] = self._own_seconds(lane, memory)
        return True

    def shrinking(self, lane: Lane) -> float:
        """The part of what is sent at or above the lane that is not made up for by what comes there."""
        sent = self._sent_flows[lane][1].per_s(0)
        came = sum([self._came_flows[upper][1].per_s(0) for upper in range(lane + 1)], 0.0)
        return 1.0 - came / sent if sent > 0 else 1.0

    def seconds_at_best(self, lane: Lane) -> float:
        """Seconds that a job at or above the lane takes to go, if no better ones came; 0 where nothing is known."""
        sent = self._sent_flows[lane][1].per_s(0)
        return 1.0 / sent if sent > 0 else 0.0

    def _seconds(self, lane: int, memory: int) -> Seconds:
        jobs, prompt, output = (self._seconds_in(lane, memory, currency) for currency in _CURRENCIES)
        return (jobs, prompt, output)

    def _seconds_in(self, lane: int, memory: int, currency: int) -> float:
        sent = self._sent_flows[lane][memory].per_s(currency)
        if sent <= 0:
            return 0.0
        came_above = sum([self._came_flows[upper][memory].per_s(currency) for upper in range(lane)], 0.0)
        return 1.0 / max(sent - came_above, LEAST_NET * sent)

    def _own_seconds(self, lane: int, memory: int) -> Seconds:
        own = [self._own_flows[lane][memory].per_s(currency) for currency in _CURRENCIES]
        jobs, prompt, output = (1.0 / each if each > 0 else 0.0 for each in own)
        return (jobs, prompt, output)


def _zeros() -> list[list[float]]:
    return [[0.0, 0.0, 0.0] for _ in Lane]


def _flows() -> list[list[_Flow]]:
    return [[_Flow(memory_s) for memory_s in MEMORIES_S] for _ in Lane]


def _add(amounts: list[float], prompt_tokens: int, output_tokens: int) -> None:
    amounts[0] += 1
    amounts[1] += prompt_tokens
    amounts[2] += output_tokens
