"""How fast prompts are sent to a worker while live sequences decode there: a token bucket in prompt tokens.

The rate protects live sequences that decode, so it binds only lanes below the highest of them: while P0 decodes, P1 and
P2 are paced; while only P1 decodes, P2 is; P0 never is. Prompts that are not paced spend from the bucket as well. While
no live sequence decodes, no lane is paced and nothing is spent.
"""

from math import inf, nextafter
from typing import Final

from inferry.scheduling.queues.quantum import QUANTUM_TOKENS

# So that a bucket is full enough at its retry time in spite of rounding.
_ROUNDING_TOKENS: Final = 1e-6
MAX_DEBT_S: Final = 0.25
"""Debt, in seconds of the rate, that unpaced prompts may leave in the bucket."""
MAX_PACED_DEBT_S: Final = 1.0
"""Debt that paced prompts may leave."""


class TickContext:
    """What all buckets have in common: the size of one, and the time.

    `earliest_retry_at` is when the job that is being placed may try again on a worker that only its rate keeps it from;
    the selector clears it before it places a job. `retry_at` is the soonest such time over all waiting jobs. It
    `bounds_holds` once the view of a worker says how long jobs would wait in the engine alone.
    """

    __slots__ = ("bounds_holds", "burst_tokens", "earliest_retry_at", "now", "retry_at")

    def __init__(self, burst_tokens: int = QUANTUM_TOKENS) -> None:
        self.burst_tokens = float(burst_tokens)
        self.now = 0.0
        self.bounds_holds = False
        self.earliest_retry_at: float | None = None
        self.retry_at: float | None = None

    def start(self, now: float) -> None:
        """A new round of planning."""
        self.now = now
        self.retry_at = None

    def schedule_retry(self, at: float) -> None:
        """A waiting job may try again at `at`."""
        if self.retry_at is None or at < self.retry_at:
            self.retry_at = at


class PrefillTokenBucket:
    """The bucket of one worker. A prompt larger than the bucket goes when it is full and leaves it in debt.

    The debt is bounded, so that neither a burst of live calls nor one long prompt shuts lower lanes out for long. A
    lane with a reserve leaves the same part of the bucket to higher lanes. The bucket is refilled when it is read.
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

    def spend(self, tokens: int, max_debt_s: float) -> None:
        """A prompt goes. It leaves a debt of `max_debt_s` at most."""
        if self._refilled_at < self._tick_context.now:
            self._refill()
        self._level = max(self._level - tokens, min(self._level, -max_debt_s * self._rate))

    def _refill(self) -> None:
        tick_context = self._tick_context
        self._level = min(tick_context.burst_tokens, self._level + self._rate * (tick_context.now - self._refilled_at))
        self._refilled_at = tick_context.now
