"""Quotas of one tenant or one key: requests per minute, tokens per minute, and concurrent calls.

A job takes the most it may use on admission. At its end the bucket gets back what was not used; usage beyond that is a
debt, which refills first. Concurrent calls therefore cannot overshoot. A check only refills the bucket, so a refusal
leaves no trace.

The gate owns all `Quotas`. It checks all quotas of a call before it takes from any.
"""

from math import inf
from typing import Final

from inferry.domain.tenants import Limits

MINUTE_S: Final = 60.0
MAX_RETRY_S: Final = 120.0
DEFAULT_END_INTERVAL_S: Final = 1.0
"""Interval between ends of calls, assumed before the first measurement."""
_ROUNDING_TOLERANCE: Final = 1e-6
"""A retry exactly at the stated time is not refused because of rounding."""
_END_INTERVAL_WEIGHT: Final = 0.2


class TokenBucket:
    """A token bucket that refills at the rate per minute and holds one minute's amount. A negative level is debt."""

    __slots__ = ("at", "burst", "level", "per_s", "tolerance")

    def __init__(self, per_minute: int, now: float) -> None:
        self.at = now
        self.level = float(per_minute)
        self.resize(per_minute)

    def resize(self, per_minute: int) -> None:
        """Change the rate and the size. The level is kept, up to the new size."""
        self.burst = per_minute
        self.per_s = per_minute / MINUTE_S
        self.tolerance = _ROUNDING_TOLERANCE * max(1.0, per_minute / 1000)
        self.level = min(self.level, float(per_minute))

    def level_at(self, now: float) -> float:
        level = self.level + max(0.0, now - self.at) * self.per_s
        return level if level < self.burst else float(self.burst)

    def fill(self, now: float) -> None:
        if now > self.at:
            level = self.level + (now - self.at) * self.per_s
            self.level = level if level < self.burst else float(self.burst)
            self.at = now

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` can be taken; 0 for now. An amount above the size needs a full bucket."""
        self.fill(now)
        missing = (amount if amount < self.burst else self.burst) - self.level
        if missing <= self.tolerance and self.burst:
            return 0.0
        return missing / self.per_s if self.burst else inf

    def take(self, amount: int) -> None:
        """Take `amount`. The caller has checked `wait_s` at the same time."""
        self.level -= amount

    def settle(self, amount: int, now: float) -> None:
        """Return `amount` to the bucket; a negative amount is taken."""
        self.fill(now)
        level = self.level + amount
        self.level = level if level < self.burst else float(self.burst)


class Quotas:
    """The recent use of one tenant or key, and its current limits."""

    __slots__ = ("_end_interval_s", "_last_end_at", "in_flight", "max_concurrent", "owner_kind", "requests", "tokens")

    def __init__(self, owner_kind: str) -> None:
        self.owner_kind = owner_kind
        self.in_flight = 0
        self.max_concurrent: int | None = None
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self._last_end_at = 0.0
        self._end_interval_s: float | None = None

    def set_limits(self, limits: Limits, now: float) -> None:
        """Replace the limits. Jobs in flight keep what they have taken."""
        self.max_concurrent = limits.max_concurrent
        self.requests = _resized_bucket(self.requests, limits.requests_per_minute, now)
        self.tokens = _resized_bucket(self.tokens, limits.tokens_per_minute, now)

    def wait(self, tokens: int, now: float) -> tuple[float, str] | None:
        """Seconds until a call with `tokens` tokens fits, and the limit that binds; None if it fits now."""
        wait_s, limit = 0.0, ""
        limit_concurrent = self.max_concurrent
        if limit_concurrent is not None and self.in_flight >= limit_concurrent:
            wait_s, limit = (
                self.slots_free_in_s(self.in_flight - limit_concurrent + 1) if limit_concurrent else inf,
                "max_concurrent",
            )
        if self.requests is not None and (until := self.requests.wait_s(1, now)) > wait_s:
            wait_s, limit = until, "requests_per_minute"
        if self.tokens is not None and (until := self.tokens.wait_s(tokens, now)) > wait_s:
            wait_s, limit = until, "tokens_per_minute"
        return (wait_s, limit) if limit else None

    def acquire(self, now: float) -> None:
        """One more call is in flight."""
        if not self.in_flight:
            self._last_end_at = now  # idle time does not count as an interval between ends
        self.in_flight += 1

    def release(self, now: float) -> None:
        end_interval_s = now - self._last_end_at
        self._last_end_at = now
        self._end_interval_s = (
            end_interval_s
            if self._end_interval_s is None
            else self._end_interval_s + _END_INTERVAL_WEIGHT * (end_interval_s - self._end_interval_s)
        )
        self.in_flight -= 1

    def slots_free_in_s(self, count: int) -> float:
        """Seconds until `count` calls have ended, at the recent rate."""
        interval_s = DEFAULT_END_INTERVAL_S if self._end_interval_s is None else self._end_interval_s
        return min(MAX_RETRY_S, max(0.001, count * interval_s))

    @property
    def last_change_at(self) -> float:
        """The time at which a quota was last taken or returned."""
        at = self._last_end_at
        if self.requests is not None:
            at = max(at, self.requests.at)
        return at if self.tokens is None else max(at, self.tokens.at)


def _resized_bucket(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    bucket.fill(now)
    bucket.resize(per_minute)
    return bucket
