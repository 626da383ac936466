"""The `cluster` section of the configuration: several gateways that share limits and workers."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from msgspec import Struct

from inferry.domain.ledger_urls import is_postgresql

MIN_TTL_MS, MAX_TTL_MS = 300, 3000
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_SCHEMES = ("redis", "rediss", "unix")


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several gateways. Without `redis` there is one."""

    redis: str | None = None
    """Redis that the gateways share: `redis://HOST:PORT/0`, `rediss://…` with TLS, or `unix:///PATH` (with `pip install
    'inferry[redis]'`). Budgets, rates, concurrent calls and cancelled runs then count over all gateways. The ledger
    must be PostgreSQL. INFERRY_CLUSTER__REDIS sets it too, which keeps a password out of the file."""
    name: str | None = None
    """Name of this gateway in logs; null uses the host's name."""
    ttl_ms: int = 3000
    """After this time without contact to Redis a gateway counts as dead, and spends nothing that it shares. Between 300
    and 3000."""


def check_cluster(config: ClusterConfig, ledger: str) -> Iterator[str]:
    if config.redis is None:
        return
    try:
        parts = urlsplit(config.redis)
        is_url = parts.scheme in _SCHEMES and bool(parts.path if parts.scheme == "unix" else parts.hostname)
        _ = parts.port
    except ValueError:
        is_url = False
    if not is_url:
        yield "cluster.redis must be of the form redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix:///PATH"
    if not is_postgresql(ledger):
        yield "cluster.redis requires a ledger in PostgreSQL: gateways that share limits share their ledger"
    if not MIN_TTL_MS <= config.ttl_ms <= MAX_TTL_MS:
        yield f"cluster.ttl_ms must be between {MIN_TTL_MS} and {MAX_TTL_MS}"
    if config.name is not None and not _NAME.fullmatch(config.name):
        yield "cluster.name must be 1 to 64 letters, digits, dots, dashes and underscores"
