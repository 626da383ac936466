"""The sections `auth`, `tenants` and `prices` of the configuration, and remarks on them."""

import ipaddress
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from inferry.cli.config.workers import EmbeddedWorkerConfig, RayWorkerConfig, VllmInProcessWorkerConfig, WorkerConfig
from inferry.domain.keys import is_valid_tenant_name
from inferry.domain.prices import Price
from inferry.domain.tenant_settings import MONEY_CEILINGS, LimitSettings, TenantSettings
from inferry.engine.bundled import BUNDLED_MODEL


class AuthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether calls need a key. See [Tenants and keys](../howto/tenants-and-keys.md)."""

    mode: Literal["auto", "on", "off"] = "auto"
    """`on` requires a key for every call. `auto` does so from the first created key on, and until then serves
    clients on this host only. `off` never does: the tenant is `x-inferry-tenant`."""
    allow_remote: bool = False
    """With `mode: off`: also serve other hosts. Any client that reaches the gateway can then call as any tenant.
    `inferry serve --no-auth` sets both."""


class TenantConfig(TenantSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A customer, team or service. Tenants of the configuration cannot be changed through `/admin/tenants` or
    `inferry tenants`, which store theirs in the ledger's database. Keys are always stored there.
    """


class PriceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of a model, in one currency. The key is the model name, or `*` for models without their own."""

    input: float = 0.0
    """Per million prompt tokens."""
    cached_input: float | None = None
    """Per million prompt tokens found in a prefix cache; null: the same as `input`."""
    output: float = 0.0
    """Per million output tokens."""
    gpu_hour: float | None = None
    """Per GPU-hour, charged if there is no price per token: by measured or
    [estimated](../explanation/ledger.md#gpu-seconds) GPU time, when a call ends. A running call is stopped when its GPU
    time so far reaches a money ceiling; it may exceed the ceiling by the GPU time until the engine has stopped."""

    def price(self) -> Price:
        return Price(**{name: getattr(self, name) for name in self.__struct_fields__})


def check_tenants(
    auth: AuthConfig, tenants: Mapping[str, TenantConfig], prices: Mapping[str, PriceConfig]
) -> Iterator[str]:
    """Error messages for `auth`, `tenants` and `prices`."""
    if auth.allow_remote and auth.mode != "off":
        yield f"auth.allow_remote requires auth.mode: off; it is {auth.mode}"
    for name, tenant in tenants.items():
        if not is_valid_tenant_name(name):
            yield f"tenants.{name}: a name is 1 to 64 letters, digits, dots, dashes and underscores"
        yield from tenant.validation_errors(f"tenants.{name}.")
    for model, price in prices.items():
        for field in price.__struct_fields__:
            value = getattr(price, field)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                yield f"prices.{model}.{field} must be at least 0"


def check_pools(tenants: Mapping[str, TenantConfig], workers: Sequence[WorkerConfig]) -> Iterator[str]:
    """Error messages for tenants with `isolation: pool` and no worker in their pool."""
    pools = {worker.pool for worker in workers}
    for name, tenant in tenants.items():
        if tenant.isolation == "pool" and name not in pools:
            yield f"tenants.{name}.isolation is pool, but no worker has `pool: {name}`"


def advise_on_tenants(
    tenants: Mapping[str, TenantConfig], prices: Mapping[str, PriceConfig], workers: Sequence[WorkerConfig]
) -> Iterator[str]:
    """Warnings about settings without the expected effect."""
    for worker in workers:
        if worker.pool is not None and getattr(tenants.get(worker.pool), "isolation", "pool") != "pool":
            yield (
                f"worker {worker.name} is reserved for tenant {worker.pool}, whose isolation is "
                f"{tenants[worker.pool].isolation}: it gets no calls until isolation is pool"
            )
    for worker in workers:
        engine = worker.engine if isinstance(worker, RayWorkerConfig) else worker
        for model in _models(worker) if engine.gpus == 0 else ():
            price = prices.get(model, prices.get("*", PriceConfig())).price()
            if price.gpu_hour is not None and not price.is_per_token:
                yield f"prices: {model} has a price per GPU-hour only, and worker {worker.name} has no GPUs: it is free"
    yield from unpriced_models({f"tenants.{name}": one for name, one in tenants.items()}, prices, workers)


def unpriced_models(
    limits: Mapping[str, LimitSettings], prices: Mapping[str, PriceConfig], workers: Sequence[WorkerConfig]
) -> Iterator[str]:
    """Warnings about models without a price per token under money ceilings. `limits` are keyed by their path."""
    in_money = [f"{where}.{field}" for where, one in limits.items() for field in MONEY_CEILINGS if getattr(one, field)]
    if in_money:
        for model in dict.fromkeys(model for worker in workers for model in _models(worker)):
            price = prices.get(model, prices.get("*", PriceConfig()))
            if price.price().is_per_token:
                continue
            if price.gpu_hour is not None:
                yield (
                    f"{in_money[0]}: calls of {model} may exceed it by the GPU time until they are stopped, because "
                    "its price is per GPU-hour"
                )
            else:
                yield f"{in_money[0]}: calls of {model} are not counted, because prices has no price per token for it"


def exposure_error(auth: AuthConfig, host: str, is_auth_required: bool) -> str | None:
    """Why the gateway must not listen on this address; None if it may."""
    if is_auth_required or auth.allow_remote or is_loopback(host):
        return None
    if auth.mode == "off":
        return (
            f"auth.mode is off and {host} is reachable from other hosts: any client could call as any tenant; listen "
            "on 127.0.0.1, or set auth.allow_remote: true (or `inferry serve --no-auth`) on a protected network"
        )
    return (
        f"{host} is reachable from other hosts and there is no API key: create one with `inferry keys create "
        "--tenant NAME` (with the same --config), or listen on 127.0.0.1; `inferry serve --no-auth` disables "
        "authentication"
    )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _models(worker: WorkerConfig) -> tuple[str, ...]:
    """The models of a worker as far as the configuration tells."""
    if isinstance(worker, RayWorkerConfig):
        return _models(worker.engine)
    if worker.models or not isinstance(worker, EmbeddedWorkerConfig | VllmInProcessWorkerConfig):
        return worker.models or (f"worker {worker.name}",)
    return (BUNDLED_MODEL if worker.model is None else Path(worker.model).expanduser().resolve().name,)
