"""Makes the election of the gateway that owns the workers, where several gateways share them.

Part of the composition root. All worker groups form one domain. Without `cluster.listen` every gateway uses its workers
itself, and the owner only runs stored work.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from inferry.cli.cluster_keys import read_key
from inferry.cli.config.cluster import split_address
from inferry.cli.config.schema import Config
from inferry.cli.config.workers import WorkerConfig
from inferry.cli.ingress_tokenizers import read_tokenizers
from inferry.cli.owned_workers import OwnedWorkers
from inferry.cli.roles import MakeWorkers, Roles, WatchFile
from inferry.cli.sharing_wiring import GatewaySharing
from inferry.cli.wiring import Service, assemble
from inferry.cli.worker_wiring import make_worker, worker_kind
from inferry.cli.workers_file_wiring import load_watched_workers, watch_workers_file
from inferry.cluster.election import Election
from inferry.cluster.ownership import OwnershipLease
from inferry.dispatch.periodic_task import PeriodicTask
from inferry.dispatch.workers_file import WorkersFileWatcher
from inferry.domain.clock import Clock
from inferry.domain.ports import Tokenizer, Worker
from inferry.ingress.member_app import MemberApp
from inferry.workers.remote.owner_link import OwnerAddress

DOMAIN = "workers"
STORED_WORK_POLL_S = 5.0
"""Interval at which the owner looks for stored work that other gateways have accepted."""


class GatewayRole:
    """Changes the role of a gateway: whose workers it uses, and whether it runs stored work."""

    def __init__(self, service: Service, roles: Roles | None, secret: bytes | None) -> None:
        self._service = service
        self._roles = roles
        self._secret = secret
        self._runs_stored_work = False
        self._polling = PeriodicTask(service.storage.poll, STORED_WORK_POLL_S, "stored work")

    async def become_owner(self, epoch: int, may_send: Callable[[], bool]) -> None:
        if self._roles is not None:
            await self._roles.become_owner(epoch, may_send)
        if not self._runs_stored_work:
            self._runs_stored_work = True
            self._service.storage.start()
            self._polling.start()

    async def become_ingress(self, address: str, epoch: int) -> None:
        await self.close()
        self._runs_stored_work = False
        await self._service.storage.stop()  # the owner runs it
        if self._roles is not None:
            host, port = split_address(address)
            await self._roles.become_ingress(OwnerAddress(host=host, port=port, secret=self._secret, epoch=epoch))

    async def close(self) -> None:
        """Look for no further stored work."""
        await self._polling.close()


class ClusterMember:
    """A gateway's part in the cluster: its service, its role and its claim to the workers."""

    def __init__(
        self, service: Service, sharing: GatewaySharing, roles: Roles | None, role: GatewayRole, election: Election
    ) -> None:
        self.service = service
        self.sharing = sharing
        self.roles = roles
        self.role = role
        self.election = election

    def start(self) -> None:
        self.election.start()

    async def hand_over(self) -> None:
        """Leave the workers to the next owner, if this gateway owns them. Jobs of other gateways continue there."""
        if self.roles is None or self.roles.is_owner:
            await self.close()

    async def close(self) -> None:
        """Hand the workers over, before the service is closed. May be repeated."""
        await self.election.stop()  # first: a change of role would open again what is closed here
        if self.roles is not None:
            await self.roles.close()
        await self.election.close()
        await self.role.close()


def build_service(config: Config, clock: Clock, tokenizers: dict[str, Tokenizer]) -> Service:
    """A service whose workers come with its role."""
    return assemble(config, [], tokenizers, clock, app_type=MemberApp)


def join_cluster(config: Config, service: Service, clock: Clock, tokenizers: dict[str, Tokenizer]) -> ClusterMember:
    """The gateway's part in the cluster of its configuration. Nothing is started."""
    cluster, sharing = config.cluster, service.sharing
    assert sharing is not None, "a cluster shares its limits"
    roles, secret, address = None, None, ""
    if cluster.listen is not None:
        secret, address = read_key(cluster.secret_env, "cluster.secret_env"), cluster.advertise or cluster.listen
        make, watch = _worker_factory(config, clock, tokenizers), _watcher_factory(config, clock, tokenizers)
        listen = split_address(cluster.listen)
        roles = Roles(
            service,
            make,
            clock,
            listen=listen,
            secret=secret,
            tokenizers=tokenizers,
            read_tokenizers=partial(read_tokenizers, config, clock),
            watch_file=watch,
        )
    lease = OwnershipLease(DOMAIN, sharing.gateway_id, address, cluster.ttl_ms / 1000)
    role = GatewayRole(service, roles, secret)
    election = Election(lease, sharing.authority, role, clock)
    sharing.metrics.watch(
        {
            "inferry_domain_owner": lambda: float(election.is_owner),
            "inferry_domain_epoch": lambda: lease.owner.epoch,
        }
    )
    return ClusterMember(service, sharing, roles, role, election)


def _worker_factory(config: Config, clock: Clock, tokenizers: dict[str, Tokenizer]) -> MakeWorkers:
    async def make() -> list[tuple[Worker, str]]:
        found: list[tuple[Worker, str]] = []
        for one in config.workers:
            worker, more = await asyncio.to_thread(make_worker, one, clock, config.lane_policies(), config.health)
            tokenizers.update(more)
            found.append((worker, worker_kind(one)))
        return found

    return make


def _watcher_factory(config: Config, clock: Clock, tokenizers: dict[str, Tokenizer]) -> WatchFile | None:
    """Watches the `workers_file` while this gateway is the owner. Raises ConfigError for a file that is invalid now."""
    if config.workers_file is None:
        return None
    load_watched_workers(config)

    def watch(owned: OwnedWorkers) -> WorkersFileWatcher[WorkerConfig]:
        return watch_workers_file(config, owned, {}, tokenizers, clock)

    return watch
