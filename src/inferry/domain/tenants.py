"""Who calls: tenants, their keys, and what each of them may use."""

from typing import Literal

import msgspec
from msgspec import Struct

from inferry.domain.lanes import Lane

NANOS_PER_UNIT = 1_000_000_000
"""Money is counted in whole billionths, so that sums are exact."""

Isolation = Literal["salt", "pool", "none"]


class Limits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tenant, or one key of it, may use; None is no limit. Both apply where both are given.

    `models` are names, where a `*` stands for anything. Tokens are those of prompts and answers together. A run's
    ceilings hold for its whole tree. Money is in the currency that prices are written in; days and months are UTC's.
    """

    models: tuple[str, ...] | None = None
    max_lane: Lane = Lane.P0
    default_lane: Lane | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    run_token_ceiling: int | None = None
    run_money_ceiling: float | None = None
    day_token_ceiling: int | None = None
    month_token_ceiling: int | None = None
    day_money_ceiling: float | None = None
    month_money_ceiling: float | None = None


class Tenant(Struct, frozen=True, kw_only=True):
    """One customer, team or service. `shadow`: its limits are only reported, never enforced."""

    name: str
    limits: Limits = Limits()
    isolation: Isolation = "salt"
    weight: float = 1.0
    shadow: bool = False
    disabled: bool = False


class ApiKey(Struct, frozen=True, kw_only=True):
    """One key of a tenant, without its secret: a hash says whether a given one is it. Times are Unix seconds."""

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
    """What a model costs: per million tokens, or for GPUs of one's own per hour of one.

    `cached_input` is None where cached tokens cost as much as others. Where no price per token is given, the measured
    GPU time is what is charged; budgets in money then hold only as far as GPU time can be told from tokens, so they
    ask for prices per token.
    """

    input: float = 0.0
    cached_input: float | None = None
    output: float = 0.0
    gpu_hour: float | None = None

    @property
    def is_per_token(self) -> bool:
        return bool(self.input or self.output or self.cached_input)

    def nanos(self, prompt: int, cached: int, output: int, gpu_seconds: float | None = None) -> int:
        """What so many tokens cost, in billionths; rounded up, so that nothing adds up to less than it is."""
        if not self.is_per_token:
            return (
                0
                if self.gpu_hour is None or gpu_seconds is None
                else round(self.gpu_hour * gpu_seconds / 3600 * NANOS_PER_UNIT)
            )
        cached_rate = self.input if self.cached_input is None else self.cached_input
        # Prices per million times a billion over a million: a thousand billionths per token and unit of price.
        cost = 1000 * ((prompt - cached) * self.input + cached * cached_rate + output * self.output)
        return -int(-cost // 1)


FREE = Price()


def decode_limits(raw: bytes) -> Limits:
    """Limits as a store keeps them."""
    return msgspec.json.decode(raw, type=Limits)
