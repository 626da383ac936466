"""How fast prompts are sent to a worker while live sequences decode there: a bucket of prompt tokens.

The rate is there for the sake of those who decode, so it binds only lanes below the best lane that decodes there: with
a sequence of P0 decoding P1 and P2 are paced, with none but P1's only P2 is, and P0 never waits for it. What goes
anyway spends from the bucket as well. While nothing live decodes nobody waits and nothing is spent.
"""

from math import inf, nextafter

from inferry.domain.lanes import Lane
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS

# A breath of slack, so that a bucket that was waited for is full enough in spite of rounding.
_ROUNDING_TOKENS = 1e-6


LATENCY_LANES = (Lane.P0, Lane.P1)
"""The lanes whose gaps between tokens are worth protecting."""
NO_LANE = max(Lane) + 1
"""Where a lane is asked for and none decodes: below all of them."""
MAX_DEBT_S = 0.25
"""How far prompts that do not wait for the pace may put the bucket in debt, in seconds of its rate."""


class TickContext:
    """What all buckets have in common: how much one holds, and the time.

    `earliest_retry_at` is when the job that is being placed may try again on some worker that lacks only pace for it;
    whoever places a job clears it before. `retry_at` is the soonest such time over all jobs that wait.
    """

    __slots__ = ("burst_tokens", "earliest_retry_at", "now", "retry_at")

    def __init__(self, burst_tokens: int = QUANTUM_TOKENS) -> None:
        self.burst_tokens = float(burst_tokens)
        self.now = 0.0
        self.earliest_retry_at: float | None = None
        self.retry_at: float | None = None

    def start(self, now: float) -> None:
        """A new round: whoever is still short will say so again."""
        self.now = now
        self.retry_at = None

    def schedule_retry(self, at: float) -> None:
        """A job that waits may try again then."""
        if self.retry_at is None or at < self.retry_at:
            self.retry_at = at


class PrefillTokenBucket:
    """The bucket of one worker. A prompt larger than the bucket goes when it is full and leaves it in debt.

    Prompts that waited owe all they take, so that the rate holds in the long run. Those that did not wait owe up to a
    moment's worth (`MAX_DEBT_S`), so that a burst of live calls does not shut lower lanes out for long.

    Lanes that leave part of a worker's room to their betters leave the same part of the bucket. It is filled up only
    when somebody asks.
    """

    __slots__ = ("_level", "_rate", "_refilled_at", "_tick_context")

    def __init__(self, tick_context: TickContext, rate: float) -> None:
        self._tick_context = tick_context
        self._rate = rate
        self._level = tick_context.burst_tokens
        self._refilled_at = tick_context.now

    def set_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._refill()
            self._rate = rate

    def allows(self, tokens: int, fill: float) -> bool:
        """Whether the prompt may be sent now. If not, note when the bucket will be full enough."""
        tick_context, burst = self._tick_context, self._tick_context.burst_tokens
        if self._refilled_at < tick_context.now:
            self._refill()
        needed = min(float(tokens), burst * fill) + burst * (1.0 - fill)
        if self._level + _ROUNDING_TOKENS >= needed:
            return True
        if self._rate > 0:
            at = max(tick_context.now + (needed - self._level) / self._rate, nextafter(tick_context.now, inf))
            if tick_context.earliest_retry_at is None or at < tick_context.earliest_retry_at:
                tick_context.earliest_retry_at = at
        return False

    def spend(self, tokens: int) -> None:
        """A prompt that had to wait for the bucket goes."""
        self._level -= tokens

    def spend_unpaced(self, tokens: int) -> None:
        """A prompt that need not wait goes. It puts nobody further in debt than a moment's worth."""
        if self._refilled_at < self._tick_context.now:
            self._refill()
        self._level = max(self._level - tokens, min(self._level, -MAX_DEBT_S * self._rate))

    def _refill(self) -> None:
        tick_context = self._tick_context
        self._level = min(tick_context.burst_tokens, self._level + self._rate * (tick_context.now - self._refilled_at))
        self._refilled_at = tick_context.now
