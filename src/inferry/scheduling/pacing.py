"""How fast prompts are sent to a worker while live sequences decode there: a bucket of prompt tokens."""

from math import inf, nextafter

from inferry.domain.jobs import Lane
from inferry.scheduling.quantum import QUANTUM_TOKENS

# A breath of slack, so that a bucket that was waited for is full enough in spite of rounding.
_SLACK_TOKENS = 1e-6


def is_live(lane: Lane) -> bool:
    """Whether gaps between this lane's tokens are worth protecting."""
    return lane <= Lane.P1


class Beat:
    """What all buckets have in common: how much one holds, the time, and when somebody who is short may try again."""

    __slots__ = ("burst_tokens", "now", "retry_at")

    def __init__(self, burst_tokens: int = QUANTUM_TOKENS) -> None:
        self.burst_tokens = float(burst_tokens)
        self.now = 0.0
        self.retry_at: float | None = None

    def start(self, now: float) -> None:
        """A new walk: whoever is still short will say so again."""
        self.now = now
        self.retry_at = None


class Pace:
    """The bucket of one worker. A prompt larger than the bucket goes when it is full and leaves it in debt.

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
            if beat.retry_at is None or at < beat.retry_at:
                beat.retry_at = at
        return False

    def spend(self, tokens: int) -> None:
        self._level -= tokens

    def _fill(self) -> None:
        beat = self._beat
        self._level = min(beat.burst_tokens, self._level + self._rate * (beat.now - self._filled_at))
        self._filled_at = beat.now
