"""Makes what gateways share through Redis: limits, cancelled runs and parents of runs. Part of the composition root."""

import socket
import uuid
from collections.abc import Callable
from typing import NamedTuple

from inferry.admission.grants import GrantTracker
from inferry.cli.config.cluster import ClusterConfig
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.queue_wiring import SharedQueue
from inferry.cluster.cancelled_runs import CancelledRuns
from inferry.cluster.run_links import RunLinks
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.grant_client import GrantClient
from inferry.dispatch.pool import Pool
from inferry.domain.clock import Clock
from inferry.domain.ledger import LedgerUnusable
from inferry.domain.spending import Spending
from inferry.ledger.recorder import Recorder
from inferry.ledger.stores.holdings import HoldingStore
from inferry.observe.metrics import Metrics

try:
    from inferry.cluster.redis_client import RedisAuthority
    from inferry.cluster.redis_work_queue import RedisWorkQueue
except ModuleNotFoundError:
    HAS_REDIS = False
else:
    HAS_REDIS = True


class GatewaySharing(NamedTuple):
    """The gateway's part in what is shared. `gateway_id` is that of this start of it."""

    gateway_id: str
    authority: "RedisAuthority"
    grants: GrantClient
    runs: CancelledRuns
    links: RunLinks
    metrics: Metrics
    queue: "RedisWorkQueue"

    def start(self) -> None:
        self.runs.start()
        self.links.start()

    async def close(self) -> None:
        """After the gateway, which returns its grants."""
        await self.runs.close()
        await self.links.close()
        await self.authority.close()
        await self.queue.close()


class SharedLimits(NamedTuple):
    """What the quota gate needs, before there is a gateway."""

    gateway_id: str
    authority: "RedisAuthority"
    tracker: GrantTracker
    grants: GrantClient
    queue: "RedisWorkQueue"


def make_shared_limits(
    config: Config, recorder: Recorder, clock: Clock, read_spending: Callable[[], list[Spending]]
) -> SharedLimits | None:
    """The grants of this gateway; None for a gateway that shares nothing. Raises ConfigError."""
    cluster = config.cluster
    if cluster.redis is None:
        return None
    if not HAS_REDIS:
        raise ConfigError(
            "cluster.redis needs the `redis` extra (pip install 'inferry[redis]', in a clone pip install '.[redis]')"
        )
    try:
        store = HoldingStore(config.ledger, read_spending)
    except LedgerUnusable as error:
        raise ConfigError(str(error)) from None
    gateway_id = make_gateway_id(cluster)
    authority = RedisAuthority(cluster.redis, cluster.ttl_ms)
    tracker = GrantTracker()
    grants = GrantClient(gateway_id, tracker, authority, store, recorder, clock, cluster.ttl_ms / 1000)
    return SharedLimits(gateway_id, authority, tracker, grants, RedisWorkQueue(cluster.redis))


def make_gateway_id(cluster: ClusterConfig) -> str:
    """A name that no other gateway has, and no earlier start of this one."""
    return f"{cluster.name or socket.gethostname()}-{uuid.uuid4().hex[:12]}"


def share(limits: SharedLimits, gateway: Gateway, metrics: Metrics, since: float) -> GatewaySharing:
    """Connect the gateway with the others. `since`: what they have announced from then on is known here."""
    runs = CancelledRuns(limits.gateway_id, limits.authority, gateway.cancel_announced, since)
    gateway.on_run_cancelled = runs.announce
    gateway.lineages.log = links = RunLinks(limits.authority, gateway.lineages.learn, since)
    grants = limits.grants
    metrics.watch(
        {
            "inferry_redis_up": lambda: float(grants.is_up),
            "inferry_limit_waits_total": lambda: grants.waits,
            "inferry_limit_wait_seconds_total": lambda: grants.wait_s,
            "inferry_limit_generation": lambda: grants.generation,
        }
    )
    return GatewaySharing(limits.gateway_id, limits.authority, grants, runs, links, metrics, limits.queue)


def shared_queue(config: Config, shared: SharedLimits | None, pool: Pool) -> SharedQueue | None:
    """The queue of stored work; None for a gateway that shares nothing."""
    if shared is None:
        return None
    return SharedQueue(shared.queue, shared.gateway_id, config.cluster.pull_models, pool.serves)
