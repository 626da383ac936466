"""What a configuration says of callers: how they are told apart, what each may use, what models cost."""

import ipaddress
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from inferry.cli.config.workers import EmbeddedWorkerConfig, VllmInProcessWorkerConfig, WorkerConfig
from inferry.domain.keys import is_valid_tenant_name
from inferry.domain.settings import MONEY_CEILINGS, LimitSettings, TenantSettings
from inferry.domain.tenants import Price


class AuthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether callers need a key. See [Tenants and keys](../howto/tenants-and-keys.md)."""

    mode: Literal["auto", "on", "off"] = "auto"
    """`on` asks every call for a key. `auto` does so once a first key was created, and until then serves clients on
    this machine alone. `off` never does: who calls is what `x-inferry-tenant` says."""
    allow_remote: bool = False
    """With `mode: off`: serve clients on other machines too. Whoever reaches the gateway can then use it, in any
    tenant's name. `inferry serve --no-auth` sets both."""


class TenantConfig(TenantSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One customer, team or service. What is written here cannot be changed through `/admin/tenants` or
    `inferry tenants`, which keep theirs in the ledger's database. Keys are always there.
    """


class PriceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model costs, in any one currency. The key is its name, or `*` for all that have no price of their own."""

    input: float = 0.0
    """Per million prompt tokens."""
    cached_input: float | None = None
    """Per million prompt tokens that were in a prefix cache; null: as much as others."""
    output: float = 0.0
    """Per million tokens written."""
    gpu_hour: float | None = None
    """Per hour of one's own GPU, charged where there is no price per token. Ceilings in money need prices per token."""

    def price(self) -> Price:
        return Price(**{name: getattr(self, name) for name in self.__struct_fields__})


def check_tenants(
    auth: AuthConfig, tenants: Mapping[str, TenantConfig], prices: Mapping[str, PriceConfig]
) -> Iterator[str]:
    """The same for all of a configuration's callers."""
    if auth.allow_remote and auth.mode != "off":
        yield f"auth.allow_remote goes with auth.mode: off, and that is {auth.mode}"
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
    """Tenants that keep to workers of their own and have none."""
    pools = {worker.pool for worker in workers}
    for name, tenant in tenants.items():
        if tenant.isolation == "pool" and name not in pools:
            yield f"tenants.{name}.isolation is pool, and no worker has `pool: {name}`: none of its calls could run"


def advise_on_tenants(
    tenants: Mapping[str, TenantConfig], prices: Mapping[str, PriceConfig], workers: Sequence[WorkerConfig]
) -> Iterator[str]:
    """What works otherwise than somebody may think, as sentences."""
    for worker in workers:
        if worker.pool is not None and getattr(tenants.get(worker.pool), "isolation", "pool") != "pool":
            yield (
                f"worker {worker.name} is kept for tenant {worker.pool}, whose isolation is "
                f"{tenants[worker.pool].isolation}: it gets no calls at all until that is pool"
            )
    yield from unpriced_models({f"tenants.{name}": one for name, one in tenants.items()}, prices, workers)


def unpriced_models(
    limits: Mapping[str, LimitSettings], prices: Mapping[str, PriceConfig], workers: Sequence[WorkerConfig]
) -> Iterator[str]:
    """Models whose calls count nothing against ceilings in money; limits are by what to call them."""
    in_money = [f"{where}.{field}" for where, one in limits.items() for field in MONEY_CEILINGS if getattr(one, field)]
    if in_money:
        for model in dict.fromkeys(model for worker in workers for model in _models(worker)):
            price = prices.get(model, prices.get("*", PriceConfig()))
            if not price.price().is_per_token:
                yield f"{in_money[0]}: calls of {model} count nothing against it, for prices has none per token for it"


def exposure_error(auth: AuthConfig, host: str, is_auth_required: bool) -> str | None:
    """Why a gateway that asks for keys, or does not, must not listen there; None where it may."""
    if is_auth_required or auth.allow_remote or is_loopback(host):
        return None
    if auth.mode == "off":
        return (
            f"auth.mode is off, and {host} can be reached from other machines: whoever does could use the gateway in "
            "any tenant's name; listen on 127.0.0.1, or say auth.allow_remote: true (or `inferry serve "
            "--no-auth`) if something else keeps strangers away"
        )
    return (
        f"{host} can be reached from other machines, and there is no API key yet: create one with `inferry keys create "
        "--tenant NAME` (with the same --config), or listen on 127.0.0.1; `inferry serve --no-auth` lets everybody in"
    )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _models(worker: WorkerConfig) -> tuple[str, ...]:
    """The models that a worker is known to serve before anybody has asked it."""
    if worker.models or not isinstance(worker, EmbeddedWorkerConfig | VllmInProcessWorkerConfig):
        return worker.models or (f"what worker {worker.name} lists",)
    return ("inferry-tiny" if worker.model is None else Path(worker.model).expanduser().resolve().name,)
