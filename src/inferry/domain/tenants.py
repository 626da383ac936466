"""Tenants, API keys and their limits."""

from typing import Literal

import msgspec
from msgspec import Struct

from inferry.domain.lanes import Lane

Isolation = Literal["salt", "pool", "none"]


class Limits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of a tenant or of one of its keys; None is no limit. Both apply.

    `models` may contain `*` as wildcard. `precision`: of the workers that may run the calls; None is any. Tokens are
    prompt plus output tokens. Ceilings of a run include its sub-runs. Money is in the currency of the prices; days and
    months are in UTC.
    """

    models: tuple[str, ...] | None = None
    precision: str | None = None
    max_lane: Lane = Lane.P0
    default_lane: Lane | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_concurrent_runs: int | None = None
    max_kv_tokens: int | None = None
    run_max_kv_tokens: int | None = None
    run_token_ceiling: int | None = None
    run_money_ceiling: float | None = None
    day_token_ceiling: int | None = None
    month_token_ceiling: int | None = None
    day_money_ceiling: float | None = None
    month_money_ceiling: float | None = None


class Tenant(Struct, frozen=True, kw_only=True):
    """One customer, team or service. `shadow`: limits are reported and not enforced."""

    name: str
    limits: Limits = Limits()
    isolation: Isolation = "salt"
    weight: float = 1.0
    shadow: bool = False
    disabled: bool = False


class ApiKey(Struct, frozen=True, kw_only=True):
    """An API key of a tenant with the hash of its secret. Times are Unix seconds."""

    key_id: str
    tenant: str
    secret_hash: bytes
    label: str = ""
    limits: Limits = Limits()
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def __repr__(self) -> str:
        return f"ApiKey({self.key_id!r} of {self.tenant!r})"


def decode_limits(raw: bytes) -> Limits:
    """Limits from their stored form."""
    return msgspec.json.decode(raw, type=Limits)
