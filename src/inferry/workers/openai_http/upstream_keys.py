"""The API keys of one server, and for a hosted API the rate limit of each."""

from inferry.domain.clock import Clock
from inferry.domain.errors import NoWorker
from inferry.workers.openai_http.calls import Call
from inferry.workers.openai_http.rate_limits import KeyRateLimiters, RateLimits, parse_rate_limits


class UpstreamKeys:
    """Assigns a key to every call. Keys are rate-limited only where `is_hosted`; else the first one is used."""

    __slots__ = ("_clock", "_headers", "limiter", "secrets")

    def __init__(self, secrets: tuple[str, ...], clock: Clock, *, is_hosted: bool) -> None:
        self.secrets = secrets
        self.limiter = KeyRateLimiters(max(1, len(secrets))) if is_hosted else None
        self._headers = [f"authorization: Bearer {key}\r\n".encode("latin-1") for key in secrets] or [b""]
        self._clock = clock

    def header(self, key: int | None = None) -> bytes:
        """The authorization line of a key, by default of the first one."""
        return self._headers[key or 0]

    def capacity(self, now: float) -> int | None:
        """Calls that may run at once; None where the server has set no limit."""
        return None if self.limiter is None else self.limiter.capacity(now)

    def acquire(self, call: Call, worker: str) -> NoWorker | None:
        """Assign a key to the call; return the error where every key is exhausted."""
        limiter = self.limiter
        if limiter is None or call.key is not None:
            return None
        now = self._clock.now()
        call.key = limiter.choose(now)
        if call.key is None:
            wait_s = limiter.retry_after_s(now)
            return NoWorker(f"worker {worker}: the upstream's rate limit is exhausted", retry_after_s=wait_s)
        call.key_responded = False
        limiter.keys[call.key].sent(call.job.footprint.peak_kv_tokens)
        return None

    def release(self, call: Call) -> None:
        """Return the call's key."""
        if self.limiter is not None and call.key is not None:
            key = self.limiter.keys[call.key]
            if not call.key_responded:
                key.on_response(RateLimits(), call.job.footprint.peak_kv_tokens, self._clock.now())
            key.ended()
            call.key = None

    def on_response_head(self, call: Call, status: int, rate_limit_headers: dict[bytes, bytes]) -> None:
        """Update the limits of the call's key from the head of its response."""
        if self.limiter is not None and call.key is not None and not call.key_responded:
            call.key_responded = True
            key = self.limiter.keys[call.key]
            limits = parse_rate_limits(rate_limit_headers, self._clock.wall())
            key.on_response(limits, call.job.footprint.peak_kv_tokens, self._clock.now())
            if status == 200:
                key.accepted()

    def refused(self, call: Call, rate_limit_headers: dict[bytes, bytes]) -> tuple[bool, float | None]:
        """Handle a 429 or 503: whether another key can take the call now, and the seconds after which to retry."""
        limits = parse_rate_limits(rate_limit_headers, self._clock.wall())
        if self.limiter is None or call.key is None:
            return False, limits.retry_after_s
        now = self._clock.now()
        self.limiter.keys[call.key].refused(limits, now)
        self.release(call)
        call.keys_tried += 1
        can_retry = call.keys_tried < len(self._headers) and self.limiter.choose(now) is not None
        return can_retry, None if can_retry else self.limiter.retry_after_s(now)
