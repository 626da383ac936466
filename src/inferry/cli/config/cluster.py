"""The `cluster` section of the configuration, and remarks on limits that count per gateway."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from msgspec import Struct

from inferry.cli.config.tenants import TenantConfig
from inferry.domain.ledger_urls import is_postgresql

MIN_TTL_MS, MAX_TTL_MS = 300, 3000
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_SCHEMES = ("redis", "rediss", "unix")
_DATABASE, _QUERY = re.compile(r"(/\d{0,4})?", re.ASCII), re.compile(r"(db=\d{1,4})?", re.ASCII)
_REDIS_FORM = "must be of the form redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix:///PATH"


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several gateways. Without `redis` there is one."""

    redis: str | None = None
    """Redis that the gateways share: `redis://HOST:PORT/0`, `rediss://…` with TLS, or `unix:///PATH` (with `pip install
    'inferry[redis]'`). Budgets, rates, concurrent calls and cancelled runs then count over all gateways. The ledger
    must be PostgreSQL. INFERRY_CLUSTER__REDIS sets it too, which keeps a password out of the file."""
    name: str | None = None
    """Name of this gateway in logs; null uses the host's name."""
    listen: str | None = None
    """`HOST:PORT` at which this gateway takes jobs of the others while it owns the workers. One gateway at a time owns
    them: it alone sends to the engines, and the others pass their jobs on to it. null: every gateway sends to all of
    its workers itself, and none knows what the others send."""
    advertise: str | None = None
    """`HOST:PORT` at which the other gateways reach `listen`; null for the same."""
    secret_env: str | None = None
    """Environment variable with the secret that gateways share, of at least 16 characters. Required by `listen`."""
    pull_models: tuple[str, ...] = ()
    """Models that pull-workers serve (`inferry worker`). Batch items and async jobs of these models wait for one of
    them, also where no gateway has a worker of the model."""
    worker_key_env: str | None = None
    """Environment variable with the key that pull-workers show, of at least 16 characters. Required by
    `pull_models`."""
    ttl_ms: int = 3000
    """After this time without contact to Redis a gateway counts as dead, and spends nothing that it shares. Between 300
    and 3000."""


def shown_redis_url(url: str) -> str:
    """The URL without its password."""
    credentials, at, rest = url.rpartition("@")
    scheme, _, login = credentials.partition("://")
    user, colon, _ = login.partition(":")
    return f"{scheme}://{user}:***@{rest}" if at and colon else url


def advise_on_cluster(config: ClusterConfig, tenants: Mapping[str, TenantConfig]) -> Iterator[str]:
    """Warnings about settings without the expected effect."""
    if config.redis is None:
        return
    if config.listen is None:
        yield "cluster.listen is null: every gateway schedules its workers without knowledge of the other gateways"
    for name, tenant in tenants.items():
        for limit in ("max_kv_tokens", "run_max_kv_tokens", "max_concurrent_runs"):
            if getattr(tenant, limit) is not None:
                yield f"tenant {name}: {limit} counts per gateway, not over all gateways"


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Raises ValueError."""
    parts = urlsplit(f"//{address}")
    if not parts.hostname or not parts.port or parts.path or "@" in address:
        raise ValueError(address)
    return parts.hostname, parts.port


def redis_url_problem(url: str) -> str | None:
    """Why the URL is none of a Redis; without the URL, which may have a password."""
    try:
        parts = urlsplit(url)
        is_socket = parts.scheme == "unix"
        is_url = parts.scheme in _SCHEMES and bool(parts.path if is_socket else parts.hostname)
        _ = parts.port
    except ValueError:
        return _REDIS_FORM
    is_known = _QUERY.fullmatch(parts.query) and not parts.fragment and (is_socket or _DATABASE.fullmatch(parts.path))
    return None if is_url and is_known else _REDIS_FORM


def check_cluster(config: ClusterConfig, ledger: str) -> Iterator[str]:
    if config.redis is None:
        for name in ("name", "listen", "advertise", "secret_env", "pull_models", "worker_key_env"):
            if getattr(config, name):
                yield f"cluster.{name} requires cluster.redis"
        return
    for name in ("listen", "advertise"):
        address = getattr(config, name)
        try:
            split_address(address or "host:1")
        except ValueError:
            yield f"cluster.{name} must be of the form HOST:PORT"
    if config.pull_models and not config.worker_key_env:
        yield "cluster.pull_models requires cluster.worker_key_env"
    if config.listen is not None and not config.secret_env:
        yield "cluster.listen requires cluster.secret_env"
    if config.listen is None and (config.advertise is not None or config.secret_env is not None):
        yield "cluster.advertise and cluster.secret_env require cluster.listen"
    if (problem := redis_url_problem(config.redis)) is not None:
        yield f"cluster.redis {problem}"
    if not is_postgresql(ledger):
        yield "cluster.redis requires a ledger in PostgreSQL: gateways that share limits share their ledger"
    if not MIN_TTL_MS <= config.ttl_ms <= MAX_TTL_MS:
        yield f"cluster.ttl_ms must be between {MIN_TTL_MS} and {MAX_TTL_MS}"
    if config.name is not None and not _NAME.fullmatch(config.name):
        yield "cluster.name must be 1 to 64 letters, digits, dots, dashes and underscores"
