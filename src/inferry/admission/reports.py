"""What the predictions are asked and what they answer: plain values.

Apart from what computes with them, for mypyc compiles that and cannot compile structs.
"""

from msgspec import Struct


class AccountReport(Struct, frozen=True, kw_only=True):
    """One account, for people. Ceilings are None where there are none; `key_id` is None for the tenant's own."""

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
    """Where a caller stands with its requests and tokens per minute: the tighter one of tenant and key.

    `reset_s` is how long until the bucket is full again. None where there is no such limit.
    """

    request_limit: int | None = None
    requests_left: int | None = None
    request_reset_s: float | None = None
    token_limit: int | None = None
    tokens_left: int | None = None
    token_reset_s: float | None = None
