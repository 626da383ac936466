"""The caller's rate limits as `x-ratelimit-*` headers, as OpenAI sends them."""

from math import ceil

from inferry.dispatch.gateway import Gateway, RateLimitStatus
from inferry.domain.callers import Caller


def has_rate_limits(caller: Caller) -> Caller | None:
    """The caller if it has a rate limit, else None. Called for every call."""
    limits, key = caller.tenant.limits, caller.key
    if limits.requests_per_minute is not None or limits.tokens_per_minute is not None:
        return caller
    if key is not None and (key.limits.requests_per_minute is not None or key.limits.tokens_per_minute is not None):
        return caller
    return None


def rate_limit_headers(gateway: Gateway, caller: Caller) -> bytes:
    """Header lines with the current state; empty without a limit."""
    rate_limit_status = gateway.rate_limit_status(caller)
    return b"" if rate_limit_status is None else format_rate_limits(rate_limit_status)


def format_rate_limits(rate_limit_status: RateLimitStatus) -> bytes:
    lines = ""
    for resource, limit, left, reset_s in (
        (
            "requests",
            rate_limit_status.request_limit,
            rate_limit_status.requests_left,
            rate_limit_status.request_reset_s,
        ),
        ("tokens", rate_limit_status.token_limit, rate_limit_status.tokens_left, rate_limit_status.token_reset_s),
    ):
        if limit is not None and left is not None and reset_s is not None:
            lines += (
                f"x-ratelimit-limit-{resource}: {limit}\r\nx-ratelimit-remaining-{resource}: {left}\r\n"
                f"x-ratelimit-reset-{resource}: {format_duration(reset_s)}\r\n"
            )
    return lines.encode()


def format_duration(seconds: float) -> str:
    """A duration in OpenAI's format: `20ms`, `1s`, `8.64s`, `6m0s`. Rounded up, so that waiting for it is enough."""
    ms = ceil(seconds * 1000 - 1e-6)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{ms / 1000:g}s"
    return f"{hours}h{minutes}m{rest}" if hours else f"{minutes}m{rest}" if minutes else rest
