"""An owner of workers that ingress processes connect to, in the test's own process."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from inferry.cli.gateway_wiring import make_gateway
from inferry.cluster.catalog import catalog_of
from inferry.cluster.frames import Catalog
from inferry.cluster.owner_server import OwnerServer
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.domain.callers import Caller
from inferry.domain.clock import SystemClock
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ports import Tokenizer, Worker
from inferry.domain.tenants import Tenant
from inferry.ingress.late_tokens import lacks_tokens, tokenized
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.workers.remote.owner_link import OwnerAddress, OwnerLink
from inferry.workers.remote.worker import RemoteWorker
from support.loop_helpers import ListLedger
from support.waiting import async_until


class TestOwner:
    """What `OwnerServer` needs of its process. `tenants` are those with limits."""

    __test__ = False

    def __init__(self, gateway: Gateway, tenants: Mapping[str, Tenant] | None = None) -> None:
        self._gateway = gateway
        self._tenants = tenants or {}
        self.counted: list[tuple[str, int, int]] = []

    def catalog(self) -> Catalog:
        return catalog_of(self._gateway)

    def caller(self, tenant: str, key_id: str | None) -> Caller:
        return Caller(self._tenants.get(tenant) or Tenant(name=tenant))

    def lacks_tokens(self, job: InferenceJob) -> bool:
        return lacks_tokens(job, self._gateway.models)

    async def tokenized(self, job: InferenceJob) -> InferenceJob:
        return await tokenized(job, self._gateway.models)

    def trace(self, job: InferenceJob, headers: Mapping[bytes, bytes]) -> None:
        pass

    def serve_http(self, transport: asyncio.Transport, unread: bytes, peer: str) -> None:
        transport.abort()

    def count_requests(self, path: str, status: int, number: int) -> None:
        self.counted.append((path, status, number))


class RunningOwner:
    """A gateway with workers, and its server on a Unix socket. `stop` is its death, `listen` its return."""

    def __init__(self, gateway: Gateway, ledger: ListLedger, path: Path, tenants: Mapping[str, Tenant] | None) -> None:
        self.gateway = gateway
        self.ledger = ledger
        self.path = path
        self.owner = TestOwner(gateway, tenants)
        self.server = OwnerServer(gateway, self.owner)

    async def listen(self, epoch: int = 0) -> None:
        self.server = OwnerServer(self.gateway, self.owner, epoch=epoch)
        await self.server.listen_unix(self.path)

    async def stop(self) -> None:
        for connection in list(self.server.connections):
            connection.abort()
        await self.server.close()


@asynccontextmanager
async def running_owner(
    workers: Sequence[Worker],
    path: Path,
    tenants: Mapping[str, Tenant] | None = None,
    tokenizers: dict[str, Tokenizer] | None = None,
) -> AsyncIterator[RunningOwner]:
    clock, ledger = SystemClock(), ListLedger()
    gateway = make_gateway(
        lanes=DEFAULT_LANES,
        pool=Pool(workers, clock),
        recorder=Recorder(ledger, flush_interval_s=0.001),
        metrics=Metrics(["m"], [worker.name for worker in workers]),
        clock=clock,
        tokenizers=tokenizers,
    )
    gateway.start()
    owner = RunningOwner(gateway, ledger, path, tenants)
    try:
        await async_until(lambda: gateway.is_ready)
        await owner.listen()
        yield owner
    finally:
        await owner.server.close()
        await gateway.close()


@asynccontextmanager
async def remote_worker(path: Path, name: str = "owner") -> AsyncIterator[RemoteWorker]:
    """The worker of an ingress process, connected."""
    link = OwnerLink(OwnerAddress(path), SystemClock())
    link.start()
    try:
        await link.wait_connected()
        assert link.catalog is not None
        worker = RemoteWorker(name, link, link.catalog.served[0], SystemClock())

        def follow() -> None:
            if link.catalog is not None:
                worker.served = link.catalog.served[0]

        link.on_change = follow
        yield worker
    finally:
        await link.close()


class LinkedWorker:
    """A remote worker with a link of its own, which ends with it."""

    def __init__(self, worker: RemoteWorker) -> None:
        self._worker = worker
        self.name = worker.name
        self.start, self.view, self.cards = worker.start, worker.view, worker.cards
        self.run, self.cancel, self.close = worker.run, worker.cancel, worker.link.close


@asynccontextmanager
async def closing_link(path: Path) -> AsyncIterator[LinkedWorker]:
    """The same, where closing the worker closes the link."""
    async with remote_worker(path) as worker:
        yield LinkedWorker(worker)
