"""Where a caller stands with what it may call in a minute, for whoever asks."""

from collections.abc import Sequence

from msgspec import Struct

from inferry.admission.books import Books
from inferry.admission.quotas import MINUTE_S, Bucket
from inferry.domain.tenants import Limits


class Standing(Struct, frozen=True):
    """Where a caller stands with its requests and tokens per minute: the tighter one of tenant and key.

    `reset_s` is how long until the bucket is full again. None where there is no such limit.
    """

    request_limit: int | None = None
    requests_left: int | None = None
    request_reset_s: float | None = None
    token_limit: int | None = None
    tokens_left: int | None = None
    token_reset_s: float | None = None


def standing(kept: Sequence[tuple[Limits, Books | None]], now: float) -> Standing | None:
    """Of a tenant and, where there is one, of a key: each with its limits and what is known of it."""
    requests: list[tuple[float, float, int]] = []
    tokens: list[tuple[float, float, int]] = []
    for limits, books in kept:
        if limits.requests_per_minute is not None:
            requests.append(_left(None if books is None else books.quotas.requests, limits.requests_per_minute, now))
        if limits.tokens_per_minute is not None:
            tokens.append(_left(None if books is None else books.quotas.tokens, limits.tokens_per_minute, now))
    if not requests and not tokens:
        return None
    request_level, request_reset_s, request_limit = min(requests, default=(0.0, 0.0, None))
    token_level, token_reset_s, token_limit = min(tokens, default=(0.0, 0.0, None))
    return Standing(
        request_limit,
        None if request_limit is None else max(0, int(request_level)),
        None if request_limit is None else request_reset_s,
        token_limit,
        None if token_limit is None else max(0, int(token_level)),
        None if token_limit is None else token_reset_s,
    )


def _left(bucket: Bucket | None, per_minute: int, now: float) -> tuple[float, float, int]:
    """What is in a bucket, how long until it is full, and its limit."""
    if bucket is None:
        return float(per_minute), 0.0, per_minute
    level = min(bucket.level_at(now), float(per_minute))
    return level, (per_minute - level) * MINUTE_S / per_minute if per_minute else 0.0, per_minute
