"""How fast prompts are sent to a worker while live sequences decode there: a bucket of prompt tokens."""

from math import inf, nextafter

from inferry.domain.jobs import Lane

# A breath of slack, so that a bucket that was waited for is full enough in spite of rounding.
_SLACK_TOKENS = 1e-6


def is_live(lane: Lane) -> bool:
    """Whether gaps between this lane's tokens are worth protecting."""
    return lane <= Lane.P1


class Pace:
    """The bucket of one worker. A prompt larger than the bucket goes when it is full and leaves it in debt.

    Lanes that leave part of a worker's room to their betters leave the same part of the bucket.
    """

    __slots__ = ("_at", "_level", "_short_of", "burst", "rate")

    def __init__(self, burst: int) -> None:
        self.burst = burst
        self.rate = 0.0
        self._level = float(burst)
        self._at = -inf
        self._short_of = inf

    def refill(self, now: float) -> None:
        if now > self._at:
            self._level = min(float(self.burst), self._level + self.rate * (now - self._at) if self._at > -inf else inf)
            self._at = now
        self._short_of = inf

    def allows(self, tokens: int, fill: float) -> bool:
        """Whether the prompt may be sent now. If not, remember how full the bucket has to be."""
        needed = min(float(tokens), self.burst * fill) + self.burst * (1.0 - fill)
        if self._level + _SLACK_TOKENS >= needed:
            return True
        self._short_of = min(self._short_of, needed)
        return False

    def spend(self, tokens: int) -> None:
        self._level -= tokens

    def give_back(self, tokens: int) -> None:
        self._level += tokens

    def full_enough_at(self, now: float) -> float | None:
        """When the least that somebody was short of has come in, if anybody was."""
        if self._short_of is inf or self.rate <= 0:
            return None
        return max(self._at + (self._short_of - self._level) / self.rate, nextafter(now, inf))
