"""Tenants and limits as people write them, in a file, on a command line or over HTTP: lanes by their names."""

import math
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.domain.tenants import Isolation, Limits, Tenant

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
LaneName = Literal["P0", "P1", "P2"]


class LimitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant, or one key of it, may use; null is no limit. Where both say something, both count."""

    models: tuple[str, ...] | None = None
    """Models it may use; a `*` stands for anything. null: all."""
    max_lane: LaneName = "P0"
    """The highest lane it may use."""
    default_lane: LaneName | None = None
    """Its lane where a call names none; null: P1, or `max_lane` where that is lower."""
    requests_per_minute: int | None = None
    """Calls per minute."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers per minute."""
    max_concurrent: int | None = None
    """Calls in flight at once, queued ones included."""
    run_token_ceiling: int | None = None
    """Tokens that one run may use, with all its sub-runs."""
    run_money_ceiling: float | None = None
    """The same in money, in the currency of `prices`."""
    day_token_ceiling: int | None = None
    """Tokens per day (UTC)."""
    month_token_ceiling: int | None = None
    """Tokens per month (UTC)."""
    day_money_ceiling: float | None = None
    """Money per day (UTC)."""
    month_money_ceiling: float | None = None
    """Money per month (UTC)."""

    def limits(self) -> Limits:
        given = {name: getattr(self, name) for name in LimitSettings.__struct_fields__}
        given["max_lane"] = Lane[self.max_lane]
        given["default_lane"] = None if self.default_lane is None else Lane[self.default_lane]
        return Limits(**given)

    def validation_errors(self, where: str = "") -> Iterator[str]:
        """What is of the right type and cannot be, as sentences that name its path below `where`."""
        for name in NUMERIC_LIMITS:
            value = getattr(self, name)
            if value is not None and not 0 < value < _TOO_LARGE:
                yield f"{where}{name} must be above 0" + (" and below 2^63" if value > 0 else "")
        if self.models is not None and not all(self.models):
            yield f"{where}models names a model without a name"
        if self.default_lane is not None and self.default_lane < self.max_lane:
            yield f"{where}default_lane ({self.default_lane}) is above {where}max_lane ({self.max_lane})"


class TenantSettings(LimitSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One customer, team or service: its limits, and how it is kept apart from others."""

    isolation: Isolation = "salt"
    """`salt` keeps its prompts apart from others' in prefix caches that can do so; `pool` gives it the workers whose
    `pool` is its name, and no others; `none` lets it share what is cached with other tenants of `none`."""
    weight: float = 1.0
    """Its share of a lane beside other tenants with queued jobs: 3 gets three times the tokens of 1. A change applies
    once the tenant has had no jobs."""
    shadow: bool = False
    """Its limits are only reported, never enforced."""
    disabled: bool = False
    """Nobody is let in for it."""

    def tenant(self, name: str) -> Tenant:
        rest = {field: getattr(self, field) for field in ("isolation", "weight", "shadow", "disabled")}
        return Tenant(name=name, limits=self.limits(), **rest)

    def validation_errors(self, where: str = "") -> Iterator[str]:
        yield from super().validation_errors(where)
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            yield f"{where}weight must be between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}"


def limits_as_dict(limits: Limits) -> dict[str, Any]:
    """The limits that are set, as they are written."""
    shown: dict[str, Any] = {}
    for name in LimitSettings.__struct_fields__:
        value = getattr(limits, name)
        if value != getattr(_NO_LIMITS, name):
            shown[name] = value.name if isinstance(value, Lane) else value
    return shown


def tenant_as_dict(tenant: Tenant) -> dict[str, Any]:
    """A tenant's settings without the limits it does not have, as they are written."""
    rest: dict[str, Any] = {"isolation": tenant.isolation, "shadow": tenant.shadow, "disabled": tenant.disabled}
    if tenant.weight != 1.0:
        rest["weight"] = tenant.weight
    return {**limits_as_dict(tenant.limits), **rest}


MONEY_CEILINGS = ("run_money_ceiling", "day_money_ceiling", "month_money_ceiling")

NUMERIC_LIMITS = (
    *("requests_per_minute", "tokens_per_minute", "max_concurrent"),
    *("run_token_ceiling", "day_token_ceiling", "month_token_ceiling"),
    *MONEY_CEILINGS,
)
_TOO_LARGE = math.ldexp(1, 63)
_NO_LIMITS = Limits()
