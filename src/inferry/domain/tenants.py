"""Tenants, API keys, limits and prices."""

from typing import Literal

import msgspec
from msgspec import Struct

from inferry.domain.lanes import Lane

NANOS_PER_UNIT = 1_000_000_000
"""Money is counted in integer billionths, so sums are exact."""

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


class Price(Struct, frozen=True, kw_only=True):
    """Price of a model: per million tokens, or per GPU-hour.

    `cached_input`: None if cached tokens cost as much as others. Without a price per token, GPU time is charged,
    measured or estimated. Only a price per token stops a call at a money ceiling: GPU time is not known in advance.
    """

    input: float = 0.0
    cached_input: float | None = None
    output: float = 0.0
    gpu_hour: float | None = None

    @property
    def is_per_token(self) -> bool:
        return bool(self.input or self.output or self.cached_input)

    def nanos(self, prompt: int, cached: int, output: int, gpu_seconds: float | None = None) -> int:
        """Cost in billionths, rounded up."""
        if not self.is_per_token:
            return (
                0
                if self.gpu_hour is None or gpu_seconds is None
                else round(self.gpu_hour * gpu_seconds / 3600 * NANOS_PER_UNIT)
            )
        cached_rate = self.input if self.cached_input is None else self.cached_input
        # A price per million tokens is 1000 billionths per token.
        cost = 1000 * ((prompt - cached) * self.input + cached * cached_rate + output * self.output)
        return -int(-cost // 1)


FREE = Price()


def decode_limits(raw: bytes) -> Limits:
    """Limits from their stored form."""
    return msgspec.json.decode(raw, type=Limits)
