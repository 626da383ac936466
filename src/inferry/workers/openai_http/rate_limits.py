"""Rate limits of a hosted API, from its response headers. Pure: time is an argument.

Each key has limits of its own. The reported remainder is valid until its reset; calls in flight that it may not
include are subtracted.
"""

import math
import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime

from msgspec import Struct

INITIAL_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
MAX_RETRY_AFTER_S = 3600.0
"""Upper bound of a reported retry time."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class RateLimits(Struct, frozen=True):
    """Limits from the headers of one response; None where missing."""

    requests: int | None = None
    requests_reset_s: float | None = None
    tokens: int | None = None
    tokens_reset_s: float | None = None
    retry_after_s: float | None = None


def parse_rate_limits(headers: Mapping[bytes, bytes], wall: float) -> RateLimits:
    """`headers` have lower-case names. `wall` is the wall-clock time, for a `Retry-After` with a date."""

    def text(name: bytes) -> str:
        return headers.get(name, b"").decode("latin-1").strip()

    milliseconds = _number(text(b"retry-after-ms"))
    retry_after = milliseconds / 1000 if milliseconds is not None else _retry_after(text(b"retry-after"), wall)
    return RateLimits(
        _count(text(b"x-ratelimit-remaining-requests")),
        _duration_s(text(b"x-ratelimit-reset-requests")),
        _count(text(b"x-ratelimit-remaining-tokens")),
        _duration_s(text(b"x-ratelimit-reset-tokens")),
        None if retry_after is None else min(max(retry_after, 0.0), MAX_RETRY_AFTER_S),
    )


class _Remaining:
    """The remainder of one limit of one key, until its reset."""

    __slots__ = ("remaining", "until")

    def __init__(self) -> None:
        self.remaining = math.inf
        self.until = -math.inf

    def update(self, remaining: int | None, reset_s: float | None, now: float) -> None:
        if remaining is not None:
            self.remaining, self.until = float(remaining), now + (INITIAL_PAUSE_S if reset_s is None else reset_s)

    def at(self, now: float) -> float:
        return self.remaining if now < self.until else math.inf


class KeyRateLimiter:
    """One key. Unanswered calls were sent and have no response head yet."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._unanswered = 0
        self._unanswered_tokens = 0
        self._mean_tokens = 1.0
        self._requests = _Remaining()
        self._tokens = _Remaining()
        self._paused_until = -math.inf
        self._refusals = 0

    def sent(self, tokens: int) -> None:
        self.in_flight += 1
        self._unanswered += 1
        self._unanswered_tokens += tokens
        self._mean_tokens += 0.1 * (max(tokens, 1) - self._mean_tokens)

    def on_response(self, limits: RateLimits, tokens: int, now: float) -> None:
        """Record the response head, or the loss, of a call of `tokens` tokens."""
        self._unanswered -= 1
        self._unanswered_tokens -= tokens
        self._requests.update(limits.requests, limits.requests_reset_s, now)
        self._tokens.update(limits.tokens, limits.tokens_reset_s, now)

    def ended(self) -> None:
        self.in_flight -= 1

    def accepted(self) -> None:
        self._refusals = 0

    def refused(self, limits: RateLimits, now: float) -> float:
        """Record a refusal; return the pause in seconds: the upstream's, else an exponential backoff."""
        pause = limits.retry_after_s
        if pause is None:
            resets = [
                reset
                for remaining, reset in (
                    (limits.requests, limits.requests_reset_s),
                    (limits.tokens, limits.tokens_reset_s),
                )
                if remaining == 0 and reset is not None
            ]
            pause = max(resets) if resets else min(MAX_PAUSE_S, INITIAL_PAUSE_S * 2**self._refusals)
        self._refusals = min(self._refusals + 1, 16)
        self._paused_until = max(self._paused_until, now + pause)
        return pause

    def available(self, now: float) -> float:
        """Calls that may be sent now; infinite where no limit is known."""
        if now < self._paused_until:
            return 0
        requests = self._requests.at(now) - self._unanswered
        tokens = (self._tokens.at(now) - self._unanswered_tokens) / self._mean_tokens
        return max(0, math.floor(min(requests, tokens))) if min(requests, tokens) < math.inf else math.inf

    def available_at(self, now: float) -> float:
        """When the next call may be sent."""
        times = sorted({now, self._paused_until, self._requests.until, self._tokens.until})
        return next(at for at in times if at >= now and (self.available(at) or at == times[-1]))


class KeyRateLimiters:
    """The rate limiters of one upstream's keys."""

    def __init__(self, keys: int) -> None:
        self.keys: Sequence[KeyRateLimiter] = [KeyRateLimiter() for _ in range(keys)]

    def choose(self, now: float) -> int | None:
        """The key with the most calls available, then with the fewest in flight; None where all are exhausted."""
        best = max(range(len(self.keys)), key=lambda n: (self.keys[n].available(now), -self.keys[n].in_flight))
        return best if self.keys[best].available(now) >= 1 else None

    def capacity(self, now: float) -> int | None:
        """Calls that may be in flight at once; None where the upstream has set no limit."""
        available = sum(key.available(now) for key in self.keys)
        return None if available == math.inf else int(available) + sum(key.in_flight for key in self.keys)

    def retry_after_s(self, now: float) -> float:
        return max(0.0, min(key.available_at(now) for key in self.keys) - now)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _count(text: str) -> int | None:
    value = _number(text)
    return None if value is None else max(0, int(value))


def _duration_s(text: str) -> float | None:
    """`6m0s`, `20ms`, or plain seconds."""
    number_s = _number(text)
    if number_s is not None:
        return min(max(number_s, 0.0), MAX_RETRY_AFTER_S)
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return min(sum(float(number) * _UNITS[unit] for number, unit in parts), MAX_RETRY_AFTER_S)


def _retry_after(text: str, wall: float) -> float | None:
    seconds = _number(text)
    if seconds is not None or not text:
        return seconds
    try:
        return parsedate_to_datetime(text).timestamp() - wall
    except ValueError:
        return None
