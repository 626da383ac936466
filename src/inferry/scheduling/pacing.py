"""How fast prompts are sent to a worker while live sequences decode there: a bucket of prompt tokens.

The rate is there for the sake of those who decode, so it binds only lanes below the best lane that decodes there: with
a sequence of P0 decoding P1 and P2 are paced, with none but P1's only P2 is, and P0 never waits for it. What goes
anyway spends from the bucket as well. While nothing live decodes nobody waits and nothing is spent.
"""

from math import inf, nextafter

from inferry.domain.lanes import Lane
from inferry.scheduling.quantum import QUANTUM_TOKENS

# A breath of slack, so that a bucket that was waited for is full enough in spite of rounding.
_SLACK_TOKENS = 1e-6


LIVE = (Lane.P0, Lane.P1)
"""The lanes whose gaps between tokens are worth protecting."""
NOBODY = max(Lane) + 1
"""Where a lane is asked for and none decodes: below all of them."""
DEBT_S = 0.25
"""How far prompts that do not wait for the pace may put the bucket in debt, in seconds of its rate."""


class Beat:
    """What all buckets have in common: how much one holds, and the time.

    `soonest` is when the job that is being placed may try again on some worker that lacks only pace for it; whoever
    places a job clears it before. `retry_at` is the soonest such time over all jobs that wait.
    """

    __slots__ = ("burst_tokens", "now", "retry_at", "soonest")

    def __init__(self, burst_tokens: int = QUANTUM_TOKENS) -> None:
        self.burst_tokens = float(burst_tokens)
        self.now = 0.0
        self.soonest: float | None = None
        self.retry_at: float | None = None

    def start(self, now: float) -> None:
        """A new round: whoever is still short will say so again."""
        self.now = now
        self.retry_at = None

    def wake_at(self, at: float) -> None:
        """A job that waits may try again then."""
        if self.retry_at is None or at < self.retry_at:
            self.retry_at = at


class Pace:
    """The bucket of one worker. A prompt larger than the bucket goes when it is full and leaves it in debt.

    Prompts that waited owe all they take, so that the rate holds in the long run. Those that did not wait owe up to a
    moment's worth (`DEBT_S`), so that a burst of live calls does not shut lower lanes out for long.

    Lanes that leave part of a worker's room to their betters leave the same part of the bucket. It is filled up only
    when somebody asks.
    """

    __slots__ = ("_beat", "_filled_at", "_level", "_rate")

    def __init__(self, beat: Beat, rate: float) -> None:
        self._beat = beat
        self._rate = rate
        self._level = beat.burst_tokens
        self._filled_at = beat.now

    def change(self, rate: float) -> None:
        if rate != self._rate:
            self._fill()
            self._rate = rate

    def allows(self, tokens: int, fill: float) -> bool:
        """Whether the prompt may be sent now. If not, note when the bucket will be full enough."""
        beat, burst = self._beat, self._beat.burst_tokens
        if self._filled_at < beat.now:
            self._fill()
        needed = min(float(tokens), burst * fill) + burst * (1.0 - fill)
        if self._level + _SLACK_TOKENS >= needed:
            return True
        if self._rate > 0:
            at = max(beat.now + (needed - self._level) / self._rate, nextafter(beat.now, inf))
            if beat.soonest is None or at < beat.soonest:
                beat.soonest = at
        return False

    def spend(self, tokens: int) -> None:
        """A prompt that had to wait for the bucket goes."""
        self._level -= tokens

    def spend_unasked(self, tokens: int) -> None:
        """A prompt that need not wait goes. It puts nobody further in debt than a moment's worth."""
        if self._filled_at < self._beat.now:
            self._fill()
        self._level = max(self._level - tokens, min(self._level, -DEBT_S * self._rate))

    def _fill(self) -> None:
        beat = self._beat
        self._level = min(beat.burst_tokens, self._level + self._rate * (beat.now - self._filled_at))
        self._filled_at = beat.now
