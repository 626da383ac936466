"""The state of a caller's rate limits, for the `x-ratelimit-*` headers."""

from collections.abc import Sequence

from inferry.admission.accounts import OwnerAccounts
from inferry.admission.quotas import MINUTE_S, TokenBucket
from inferry.admission.reports import RateLimitStatus
from inferry.domain.tenants import Limits


def rate_limit_status(kept: Sequence[tuple[Limits, OwnerAccounts | None]], now: float) -> RateLimitStatus | None:
    """The tighter state of tenant and key; None if neither has a rate limit. An owner without calls has no accounts."""
    request_limit: int | None = None
    token_limit: int | None = None
    requests_left = request_reset_s = tokens_left = token_reset_s = 0.0
    for limits, owner in kept:
        limit = limits.requests_per_minute
        if limit is not None:
            left, reset_s = _left(None if owner is None else owner.quotas.requests, limit, now)
            if request_limit is None or left < requests_left:
                request_limit, requests_left, request_reset_s = limit, left, reset_s
        limit = limits.tokens_per_minute
        if limit is not None:
            left, reset_s = _left(None if owner is None else owner.quotas.tokens, limit, now)
            if token_limit is None or left < tokens_left:
                token_limit, tokens_left, token_reset_s = limit, left, reset_s
    if request_limit is None and token_limit is None:
        return None
    return RateLimitStatus(
        request_limit,
        None if request_limit is None else max(0, int(requests_left)),
        None if request_limit is None else request_reset_s,
        token_limit,
        None if token_limit is None else max(0, int(tokens_left)),
        None if token_limit is None else token_reset_s,
    )


def _left(bucket: TokenBucket | None, per_minute: int, now: float) -> tuple[float, float]:
    """The level of a bucket, and the seconds until it is full."""
    if bucket is None:
        return float(per_minute), 0.0
    level = min(bucket.level_at(now), float(per_minute))
    return level, (per_minute - level) * MINUTE_S / per_minute if per_minute else 0.0
