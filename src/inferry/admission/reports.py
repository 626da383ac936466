"""Reports of accounts and rate limits.

They are msgspec Structs, which mypyc cannot compile, so this module is separate from the compiled ones.
"""

from msgspec import Struct


class AccountReport(Struct, frozen=True, kw_only=True):
    """One account as users see it. A ceiling that is not set is None; `key_id` is None for the tenant's accounts."""

    kind: str
    spent_tokens: int
    leased_tokens: int
    token_ceiling: int | None
    spent_nanos: int
    leased_nanos: int
    nano_ceiling: int | None
    key_id: str | None = None
    run_id: str | None = None


class RateLimitStatus(Struct, frozen=True):
    """Requests and tokens per minute of a caller: limit, remaining, and seconds until the bucket is full.

    Each is the tighter one of tenant and key, and None without such a limit.
    """

    request_limit: int | None = None
    requests_left: int | None = None
    request_reset_s: float | None = None
    token_limit: int | None = None
    tokens_left: int | None = None
    token_reset_s: float | None = None
