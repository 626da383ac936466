"""Where a caller stands with its limits per minute, in the headers that OpenAI's clients know."""

from math import ceil

from inferry.dispatch.gateway import Gateway, Standing
from inferry.domain.callers import Caller


def limited(caller: Caller) -> Caller | None:
    """The caller if it has limits per minute that its answers should tell of. Asked for every call, so it is short."""
    limits, key = caller.tenant.limits, caller.key
    if limits.requests_per_minute is not None or limits.tokens_per_minute is not None:
        return caller
    if key is not None and (key.limits.requests_per_minute is not None or key.limits.tokens_per_minute is not None):
        return caller
    return None


def rate_headers(gateway: Gateway, caller: Caller) -> bytes:
    """Header lines, as things stand now; none where nothing is limited."""
    standing = gateway.standing(caller)
    return b"" if standing is None else standing_headers(standing)


def standing_headers(standing: Standing) -> bytes:
    lines = ""
    for what, limit, left, reset_s in (
        ("requests", standing.request_limit, standing.requests_left, standing.request_reset_s),
        ("tokens", standing.token_limit, standing.tokens_left, standing.token_reset_s),
    ):
        if limit is not None and left is not None and reset_s is not None:
            lines += (
                f"x-ratelimit-limit-{what}: {limit}\r\nx-ratelimit-remaining-{what}: {left}\r\n"
                f"x-ratelimit-reset-{what}: {duration(reset_s)}\r\n"
            )
    return lines.encode()


def duration(seconds: float) -> str:
    """As OpenAI writes one: `20ms`, `1s`, `8.64s`, `6m0s`. Rounded up: who waits for so long has waited enough."""
    ms = ceil(seconds * 1000 - 1e-6)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{ms / 1000:g}s"
    return f"{hours}h{minutes}m{rest}" if hours else f"{minutes}m{rest}" if minutes else rest
