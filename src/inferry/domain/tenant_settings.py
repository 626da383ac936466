"""Settings of tenants and keys as written in the configuration, on the command line and in the admin API."""

import math
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.domain.tenants import Isolation, Limits, Tenant

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
LaneName = Literal["P0", "P1", "P2"]


class LimitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a tenant or of one of its keys; null is no limit. Both apply."""

    models: tuple[str, ...] | None = None
    """Models that may be used, with `*` as wildcard; null: all."""
    precision: str | None = None
    """Precision of the workers that may run the calls, as named in `workers[].precision`; null: any. That of a key
    replaces that of its tenant."""
    max_lane: LaneName = "P0"
    """Highest lane that may be used."""
    default_lane: LaneName | None = None
    """Lane of calls that name none; null: P1, or `max_lane` if that is lower."""
    requests_per_minute: int | None = None
    """Calls per minute."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens per minute."""
    max_concurrent: int | None = None
    """Concurrent calls, queued ones included."""
    max_concurrent_runs: int | None = None
    """Concurrent runs; a run and its sub-runs are one. A run counts from its first call until it is finished or
    cancelled, or has had no call for 60 seconds."""
    max_kv_tokens: int | None = None
    """KV cache tokens that its calls may hold at the same time, on all workers: prompt plus output limit of each call,
    or the predicted output where a call has no limit. Queued calls are included."""
    run_max_kv_tokens: int | None = None
    """KV cache tokens that the calls of one run and its sub-runs may hold at the same time, counted alike."""
    run_token_ceiling: int | None = None
    """Token budget of a run with all its sub-runs."""
    run_money_ceiling: float | None = None
    """Money budget of a run with all its sub-runs, in the currency of `prices`."""
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
        """Invalid values, as messages that name the path below `where`."""
        for name in NUMERIC_LIMITS:
            value = getattr(self, name)
            if value is not None and not 0 < value < _TOO_LARGE:
                yield f"{where}{name} must be above 0" + (" and below 2^63" if value > 0 else "")
        if self.models is not None and not all(self.models):
            yield f"{where}models names a model without a name"
        if self.precision == "":
            yield f"{where}precision must not be empty"
        if self.default_lane is not None and self.default_lane < self.max_lane:
            yield f"{where}default_lane ({self.default_lane}) is above {where}max_lane ({self.max_lane})"


class TenantSettings(LimitSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One customer, team or service: limits, fair share and isolation."""

    isolation: Isolation = "salt"
    """`salt`: prefix caches are salted per tenant where the engine supports it. `pool`: the tenant uses the workers
    whose `pool` is its name, and no others. `none`: the tenant shares prefix caches with other tenants of `none`."""
    weight: float = 1.0
    """Fair share of a lane among tenants with queued jobs, in tokens: weight 3 gets three times as much as weight 1. A
    change applies once the tenant has no jobs."""
    shadow: bool = False
    """Limits are reported and not enforced."""
    disabled: bool = False
    """All calls of the tenant are refused."""

    def tenant(self, name: str) -> Tenant:
        rest = {field: getattr(self, field) for field in ("isolation", "weight", "shadow", "disabled")}
        return Tenant(name=name, limits=self.limits(), **rest)

    def validation_errors(self, where: str = "") -> Iterator[str]:
        yield from super().validation_errors(where)
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            yield f"{where}weight must be between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}"


def limits_as_dict(limits: Limits) -> dict[str, Any]:
    """The limits that are set, in configuration form."""
    shown: dict[str, Any] = {}
    for name in LimitSettings.__struct_fields__:
        value = getattr(limits, name)
        if value != getattr(_NO_LIMITS, name):
            shown[name] = value.name if isinstance(value, Lane) else value
    return shown


def tenant_as_dict(tenant: Tenant) -> dict[str, Any]:
    """A tenant's settings in configuration form, unset limits omitted."""
    rest: dict[str, Any] = {"isolation": tenant.isolation, "shadow": tenant.shadow, "disabled": tenant.disabled}
    if tenant.weight != 1.0:
        rest["weight"] = tenant.weight
    return {**limits_as_dict(tenant.limits), **rest}


MONEY_CEILINGS = ("run_money_ceiling", "day_money_ceiling", "month_money_ceiling")

NUMERIC_LIMITS = (
    *("requests_per_minute", "tokens_per_minute", "max_concurrent", "max_concurrent_runs", "max_kv_tokens"),
    "run_max_kv_tokens",
    *("run_token_ceiling", "day_token_ceiling", "month_token_ceiling"),
    *MONEY_CEILINGS,
)
_TOO_LARGE = math.ldexp(1, 63)
_NO_LIMITS = Limits()
