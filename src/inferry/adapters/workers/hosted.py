"""How fast a hosted API may be called, from what its headers say. Pure: time is an argument.

Each key has limits of its own. What the upstream says is left counts until its reset; calls under way that it may not
have counted yet are taken off.
"""

import math
import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime

from msgspec import Struct

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LONGEST_TOLD_S = 3600.0
"""An upstream that asks for more patience than this is asked again then."""

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Limits(Struct, frozen=True):
    """What one answer's headers said; None where they did not."""

    requests: int | None = None
    requests_reset_s: float | None = None
    tokens: int | None = None
    tokens_reset_s: float | None = None
    retry_after_s: float | None = None


def read_limits(headers: Mapping[bytes, bytes], wall: float) -> Limits:
    """`headers` with names in lower case; `wall` is the time of day, which `Retry-After` may speak of."""

    def text(name: bytes) -> str:
        return headers.get(name, b"").decode("latin-1").strip()

    milliseconds = _number(text(b"retry-after-ms"))
    retry_after = milliseconds / 1000 if milliseconds is not None else _retry_after(text(b"retry-after"), wall)
    return Limits(
        _count(text(b"x-ratelimit-remaining-requests")),
        _span(text(b"x-ratelimit-reset-requests")),
        _count(text(b"x-ratelimit-remaining-tokens")),
        _span(text(b"x-ratelimit-reset-tokens")),
        None if retry_after is None else min(max(retry_after, 0.0), LONGEST_TOLD_S),
    )


class _Left:
    """One currency of one key: what is left of it until it is given anew."""

    __slots__ = ("left", "until")

    def __init__(self) -> None:
        self.left = math.inf
        self.until = -math.inf

    def said(self, left: int | None, reset_s: float | None, now: float) -> None:
        if left is not None:
            self.left, self.until = float(left), now + (FIRST_PAUSE_S if reset_s is None else reset_s)

    def at(self, now: float) -> float:
        return self.left if now < self.until else math.inf


class KeyPace:
    """One key. `unheard` calls were sent and have not been answered with headers yet."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._unheard = 0
        self._unheard_tokens = 0
        self._tokens_each = 1.0
        self._requests = _Left()
        self._tokens = _Left()
        self._paused_until = -math.inf
        self._refusals = 0

    def sent(self, tokens: int) -> None:
        self.in_flight += 1
        self._unheard += 1
        self._unheard_tokens += tokens
        self._tokens_each += 0.1 * (max(tokens, 1) - self._tokens_each)

    def heard(self, limits: Limits, tokens: int, now: float) -> None:
        """The head of an answer, or the loss of one, for a call that was sent with so many tokens."""
        self._unheard -= 1
        self._unheard_tokens -= tokens
        self._requests.said(limits.requests, limits.requests_reset_s, now)
        self._tokens.said(limits.tokens, limits.tokens_reset_s, now)

    def ended(self) -> None:
        self.in_flight -= 1

    def accepted(self) -> None:
        self._refusals = 0

    def refused(self, limits: Limits, now: float) -> float:
        """Too many calls: how long to pause, which is what the upstream says, else longer each time."""
        pause = limits.retry_after_s
        if pause is None:
            resets = [
                reset
                for left, reset in (
                    (limits.requests, limits.requests_reset_s),
                    (limits.tokens, limits.tokens_reset_s),
                )
                if left == 0 and reset is not None
            ]
            pause = max(resets) if resets else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._refusals)
        self._refusals = min(self._refusals + 1, 16)
        self._paused_until = max(self._paused_until, now + pause)
        return pause

    def more(self, now: float) -> float:
        """How many more calls may be sent now; infinite where nothing is known."""
        if now < self._paused_until:
            return 0
        requests = self._requests.at(now) - self._unheard
        tokens = (self._tokens.at(now) - self._unheard_tokens) / self._tokens_each
        return max(0, math.floor(min(requests, tokens))) if min(requests, tokens) < math.inf else math.inf

    def opens_at(self, now: float) -> float:
        """When another call may be sent."""
        moments = sorted({now, self._paused_until, self._requests.until, self._tokens.until})
        return next(at for at in moments if at >= now and (self.more(at) or at == moments[-1]))


class Pacer:
    """The keys of one upstream."""

    def __init__(self, keys: int) -> None:
        self.keys: Sequence[KeyPace] = [KeyPace() for _ in range(keys)]

    def choose(self, now: float) -> int | None:
        """The key with most left; between equals the one with the fewest calls under way. None: all must pause."""
        best = max(range(len(self.keys)), key=lambda n: (self.keys[n].more(now), -self.keys[n].in_flight))
        return best if self.keys[best].more(now) >= 1 else None

    def room(self, now: float) -> int | None:
        """How many calls may be under way at once; None where the upstream has set no limit."""
        more = sum(key.more(now) for key in self.keys)
        return None if more == math.inf else int(more) + sum(key.in_flight for key in self.keys)

    def retry_after_s(self, now: float) -> float:
        return max(0.0, min(key.opens_at(now) for key in self.keys) - now)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _count(text: str) -> int | None:
    value = _number(text)
    return None if value is None else max(0, int(value))


def _span(text: str) -> float | None:
    """`6m0s`, `20ms`, or plain seconds."""
    plain = _number(text)
    if plain is not None:
        return min(max(plain, 0.0), LONGEST_TOLD_S)
    parts = _SPAN.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return min(sum(float(number) * _UNITS[unit] for number, unit in parts), LONGEST_TOLD_S)


def _retry_after(text: str, wall: float) -> float | None:
    seconds = _number(text)
    if seconds is not None or not text:
        return seconds
    try:
        return parsedate_to_datetime(text).timestamp() - wall
    except ValueError:
        return None
