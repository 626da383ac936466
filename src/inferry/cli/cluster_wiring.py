"""Makes what several gateway processes need: the owner's server, and the gateway of an ingress process.

Part of the composition root.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from inferry.admission.open_gate import OpenGate
from inferry.admission.reports import RateLimitStatus
from inferry.cli.app_wiring import http_limits
from inferry.cli.composed_wiring import compose
from inferry.cli.config.schema import Config
from inferry.cli.gateway_wiring import make_gateway
from inferry.cli.ingress_tokenizers import IngressTokenizers, read_tokenizers
from inferry.cli.tracing_wiring import Tracing, make_tracing
from inferry.cli.wiring import Service, health_policy, watch_tenants
from inferry.cluster.catalog import catalog_of
from inferry.cluster.frames import Catalog, RateLimitFields, RequestsServed, ServedModels
from inferry.cluster.owner_server import OwnerServer
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.periodic_task import PeriodicTask
from inferry.dispatch.pool import Pool
from inferry.dispatch.tenants import TenantWatcher
from inferry.dispatch.values import Sharing
from inferry.domain.callers import Caller
from inferry.domain.clock import Clock, SystemClock
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import ComposedRow, GpuTimeRow, LedgerEntry
from inferry.domain.ports import TextAssembler, Tokenizer
from inferry.ingress.app import CHATS
from inferry.ingress.auth import Auth
from inferry.ingress.forwarding import ForwardingApp
from inferry.ingress.http.connection import Connection
from inferry.ingress.http.server import Server
from inferry.ingress.late_tokens import lacks_tokens, tokenized
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.streams.detokenizer import Assembler
from inferry.workers.remote.owner_link import OwnerAddress, OwnerLink
from inferry.workers.remote.worker import RemoteWorker

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
"""Interval at which an ingress process reports its HTTP requests to the owner."""


class ServiceOwner:
    """The owner's side of the link, for a whole service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server: Server | None = None
        self._owner_server: OwnerServer | None = None

    def use_owner_server(self, server: OwnerServer) -> None:
        """The server whose ingress processes are told that tenants or keys have changed."""
        if self._owner_server is None:
            self._follow_tenants()
        self._owner_server = server

    def _follow_tenants(self) -> None:
        follow = self._service.tenants.on_change

        def changed() -> None:
            if follow is not None:
                follow()
            if self._owner_server is not None:
                self._owner_server.tenants_changed()

        self._service.tenants.on_change = changed

    def use_http(self, server: Server) -> None:
        """The HTTP server for requests that ingress processes forward."""
        self._server = server

    def catalog(self) -> Catalog:
        return catalog_of(self._service.gateway)

    def caller(self, tenant: str, key_id: str | None) -> Caller:
        return self._service.tenants.stored_caller(tenant, key_id)

    def lacks_tokens(self, job: InferenceJob) -> bool:
        return lacks_tokens(job, self._service.gateway.models)

    async def tokenized(self, job: InferenceJob) -> InferenceJob:
        return await tokenized(job, self._service.gateway.models)

    def trace(self, job: InferenceJob, headers: Mapping[bytes, bytes]) -> None:
        tracing = self._service.tracing
        if tracing is not None:
            tracer = tracing.tracer
            tracer.adopt(tracer.begin(headers, f"/v1/{job.payload.api}"), job)

    def serve_http(self, transport: asyncio.Transport, unread: bytes, peer: str) -> None:
        if self._server is None:
            transport.abort()
            return
        connection = Connection(self._server, asyncio.get_running_loop())
        transport.set_write_buffer_limits()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.set_peer(peer)
        if unread:
            connection.data_received(unread)

    def count_requests(self, path: str, status: int, number: int) -> None:
        if self._server is not None:
            for _ in range(number):
                self._server.requests.count(path.encode(), status)


def make_owner_server(
    service: Service, owner: ServiceOwner, *, epoch: int = 0, secret: bytes | None = None
) -> OwnerServer:
    """The server for ingress processes. It tells them when tenants or keys have changed."""
    server = OwnerServer(service.gateway, owner, epoch=epoch, secret=secret)
    owner.use_owner_server(server)
    return server


class RemoteWorkers:
    """Keeps one worker in the pool for each isolation and precision that the owner serves."""

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._workers: dict[tuple[str | None, str | None], RemoteWorker] = {}
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> frozenset[str]:
        return frozenset(model for worker in self._workers.values() for model in worker.served.models)

    def use(self, link: OwnerLink) -> None:
        """Pass jobs on over this link. It may not be connected yet: the workers are down until then."""
        link.on_change = lambda: self._follow(link)
        for worker in self._workers.values():
            worker.link = link
        self._follow(link)

    def expect(self, catalog: Catalog, link: OwnerLink) -> None:
        """Have workers for these models, which the next owner will serve: calls wait for it."""
        for models in catalog.served:
            self._served(models, link)

    async def clear(self) -> None:
        """Take the workers out of the pool. Their jobs are lost, and offered to other workers."""
        for worker in self._workers.values():
            self._remove(worker)
        self._workers.clear()
        await self.wait_removed()

    async def wait_removed(self) -> None:
        """Return once the workers that were taken out have left the pool. They leave also if this is cancelled."""
        await asyncio.shield(asyncio.gather(*self._removals))

    def _follow(self, link: OwnerLink) -> None:
        """The connection or the catalog has changed."""
        if link.catalog is not None:
            for models in link.catalog.served:
                self._served(models, link)
            served = {(models.isolation, models.precision) for models in link.catalog.served}
            for key in [key for key in self._workers if key not in served]:
                self._remove(self._workers.pop(key))
        for worker in self._workers.values():
            self._pool.refresh_view(worker.name)
            self._pool.refresh_worker(worker.name)

    def _served(self, models: ServedModels, link: OwnerLink) -> None:
        key = models.isolation, models.precision
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = RemoteWorker(_worker_name(*key), link, models, self._clock)
            # Calls wait until the owner says that its workers are up.
            self._pool.add(worker, "remote", was_up=True)
        worker.served = models

    def _remove(self, worker: RemoteWorker) -> None:
        task = asyncio.get_running_loop().create_task(self._pool.remove(worker.name, 0.0))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)


def _worker_name(isolation: str | None, precision: str | None) -> str:
    return ":".join(("owner", *(part for part in (isolation, precision) if part is not None)))


class NoLedger:
    """The ledger of a process whose calls another one records."""

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        pass

    def append_composed(self, rows: Sequence[ComposedRow]) -> None:
        pass

    def append_gpu_time(self, rows: Sequence[GpuTimeRow]) -> None:
        pass

    def close(self) -> None:
        pass


class IngressService:
    """What an ingress process runs. `link` is its connection to the owner."""

    def __init__(
        self,
        app: ForwardingApp,
        gateway: Gateway,
        pool: Pool,
        tenants: TenantWatcher,
        link: OwnerLink,
        tracing: Tracing | None,
        tokenizers: IngressTokenizers,
    ) -> None:
        self.app = app
        self.gateway = gateway
        self.pool = pool
        self.tenants = tenants
        self.link = link
        self.tracing = tracing
        self._tokenizers = tokenizers
        self._reports = PeriodicTask(self._report, REPORT_INTERVAL_S, "HTTP requests")
        self._polls: set[asyncio.Task[None]] = set()
        link.on_tenants_changed = self._poll_tenants

    def start(self) -> None:
        self.gateway.start()
        self.tenants.start()
        self._reports.start()

    async def close(self) -> None:
        await self._reports.close()
        await self._report()
        await self._tokenizers.close()
        await self.app.close()
        await self.gateway.close()
        await self.link.close()
        await self.tenants.close()
        if self.tracing is not None:
            await self.tracing.close()

    async def _report(self) -> None:
        if self.link.is_connected and (counts := self.app.take_counts()):
            self.link.send(RequestsServed(counts))

    def _poll_tenants(self) -> None:
        task = asyncio.get_running_loop().create_task(self.tenants.poll())
        self._polls.add(task)
        task.add_done_callback(self._polls.discard)


def open_link(
    address: OwnerAddress, tokenizers: Mapping[str, Tokenizer], clock: Clock | None = None, *, admits_here: bool = False
) -> OwnerLink:
    """The connection of an ingress process to the owner, which admits its calls unless `admits_here`. Not started."""

    def assembler_for(model: str, stops: tuple[str, ...]) -> TextAssembler | None:
        tokenizer = tokenizers.get(model)
        return None if tokenizer is None else Assembler(tokenizer, stops)

    return OwnerLink(address, clock or SystemClock(), admits_here=admits_here, assembler_for=assembler_for)


def open_local_link(path: Path, tokenizers: Mapping[str, Tokenizer]) -> OwnerLink:
    """The connection to an owner on this host, at its Unix socket."""
    return open_link(OwnerAddress(path), tokenizers)


def build_ingress(
    config: Config, link: OwnerLink, tokenizers: dict[str, Tokenizer], clock: Clock | None = None
) -> IngressService:
    """The service of an ingress process, around a link that is connected. Nothing is started."""
    clock = clock or SystemClock()
    tokenizers.update(read_tokenizers(config, clock))
    tenants = watch_tenants(config, clock)
    gate = OpenGate()
    pool = Pool((), clock, health=health_policy(config.health))
    metrics = Metrics((), ())
    tracing = make_tracing(config.tracing, clock, metrics)
    tracer = None if tracing is None else tracing.tracer
    gateway = make_gateway(
        lanes=config.lane_policies(),
        pool=pool,
        recorder=Recorder(NoLedger()),
        metrics=metrics,
        clock=clock,
        tokenizers=tokenizers,
        gate=gate,
        sharing=Sharing(identical=False, repeats=False),
        max_queued_bytes=config.server.max_queued_bytes,
        request_timeout_s=config.server.request_timeout_s,
        tracer=tracer,
    )
    auth = Auth(tenants, allow_remote=config.auth.allow_remote, wall=clock.wall)
    app = ForwardingApp(gateway, metrics, http_limits(config.server), auth, tracer=tracer)
    if config.histories:
        app.stored_posts |= CHATS
    compose(config, app, gateway, config.lane_policies())
    app.use_owner(link.open_http)
    app.report_requests()
    follow_rate_limits(link, gate)
    RemoteWorkers(pool, clock).use(link)
    follow_lanes(link, gateway)
    used = IngressTokenizers(tokenizers, partial(read_tokenizers, config, clock))
    used.follow(link)
    service = IngressService(app, gateway, pool, tenants, link, tracing, used)
    tenants.on_keys_ended = lambda: _end_unauthorized(service)
    return service


def follow_rate_limits(link: OwnerLink, gate: OpenGate) -> None:
    def reported(job: InferenceJob, limits: RateLimitFields) -> None:
        status = RateLimitStatus(
            limits.request_limit,
            limits.requests_left,
            limits.request_reset_s,
            limits.token_limit,
            limits.tokens_left,
            limits.token_reset_s,
        )
        gate.reported(job.tenant, job.key_id, status)

    link.jobs.on_rate_limits = reported


def follow_lanes(link: OwnerLink, gateway: Gateway) -> None:
    """Read calls with the lane policies that the owner uses: it may have applied others than those of the file."""
    follow = link.on_change

    def changed() -> None:
        follow()
        if link.catalog is not None and link.catalog.lanes:
            gateway.models.use_lanes(link.catalog.lanes, link.catalog.tried_lanes or None)

    link.on_change = changed


def _end_unauthorized(service: IngressService) -> None:
    service.gateway.end_unauthorized(service.tenants.revocation_error)
