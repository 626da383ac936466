"""The role of a gateway in its domain: it owns the workers, or passes jobs on to the gateway that does.

A change of role is a change of the pool's workers. Jobs of the workers that leave are lost as if these had failed, and
are retried or resumed by the workers that come. Until these are up, calls wait: the workers that leave stay in the pool
as down until then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from inferry.cli.cluster_wiring import RemoteWorkers, ServiceOwner, make_owner_server, open_link
from inferry.cli.wiring import Service
from inferry.cluster.catalog import catalog_of
from inferry.cluster.owner_server import OwnerServer
from inferry.domain.clock import Clock
from inferry.domain.ports import Tokenizer, Worker
from inferry.ingress.forwarding import ForwardingApp
from inferry.workers.leased import LeasedWorker, lease
from inferry.workers.remote.owner_link import OwnerAddress, OwnerLink

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05

MakeWorkers = Callable[[], Awaitable[Sequence[tuple[Worker, str]]]]
"""The workers of the configuration, new, and the kind of each."""


class Roles:
    """Changes the role of one gateway. Changes follow one another: each waits for the one before.

    `listen` is a Unix socket, or the host and port for gateways on other hosts, with the `secret` that they share.
    """

    def __init__(
        self,
        service: Service,
        make_workers: MakeWorkers,
        clock: Clock,
        *,
        listen: Path | tuple[str, int],
        secret: bytes | None = None,
        tokenizers: Mapping[str, Tokenizer] | None = None,
    ) -> None:
        self._service = service
        self._make_workers = make_workers
        self._clock = clock
        self._listen = listen
        self._secret = secret
        self._tokenizers = tokenizers or {}
        self.owner = ServiceOwner(service)
        self.port: int | None = None
        self._server: OwnerServer | None = None
        self._link: OwnerLink | None = None
        self._remote = RemoteWorkers(service.pool, clock)
        self._owned: list[LeasedWorker] = []
        self._lock = asyncio.Lock()
        self._leaving: asyncio.Task[None] | None = None

    @property
    def is_owner(self) -> bool:
        return self._server is not None

    async def become_owner(self, epoch: int, may_send: Callable[[], bool] = lambda: True) -> None:
        """Own the workers from now on; `may_send` is asked before each send. Returns once ingresses may connect.

        An owner whose lease has ended and that owns the workers again keeps them and its connections.
        """
        async with self._lock:
            if self._server is not None:
                self._server.epoch = epoch
                for leased in self._owned:
                    leased.may_send = may_send
            else:
                try:
                    await self._own(epoch, may_send)
                except BaseException:
                    await self._disown()
                    raise
            log.info("this gateway owns the workers, in epoch %d", epoch)

    async def _own(self, epoch: int, may_send: Callable[[], bool]) -> None:
        for worker, kind in await self._make_workers():
            leased = lease(worker, may_send)
            self._service.pool.add(leased, kind)
            self._owned.append(leased)
        if self._link is not None:
            await self._link.close()  # its jobs are offered again
            self._link = None
        self._use_owner(None)
        server = self._server = make_owner_server(self._service, self.owner, epoch=epoch, secret=self._secret)
        if isinstance(self._listen, Path):
            await server.listen_unix(self._listen)
        else:
            self.port = await server.listen_tcp(*self._listen)
        self._leaving = asyncio.get_running_loop().create_task(self._leave())

    async def _disown(self) -> None:
        """Take the own workers out of the pool and disconnect other gateways: their jobs are theirs to resume."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        owned, self._owned = self._owned, []
        await asyncio.gather(*(self._service.pool.remove(leased.name, 0.0) for leased in owned))

    async def become_ingress(self, address: OwnerAddress) -> None:
        """Pass jobs on to the owner at this address. Whatever the own workers run is dropped there and resumed."""
        async with self._lock:
            await self._stop_leaving()
            if self._server is not None:
                await self._server.close()  # first: jobs of other gateways are theirs to resume
                self._server = None
            former, link = self._link, open_link(address, self._tokenizers, self._clock, admits_here=True)
            self._link = link
            self._use_owner(link)
            self._remote.expect(catalog_of(self._service.gateway), link)
            self._remote.use(link)
            link.start()
            if former is not None:
                await former.close()
            owned, self._owned = self._owned, []
            await asyncio.gather(*(self._service.pool.remove(leased.name, 0.0) for leased in owned))
            log.info("the workers are owned by the gateway at %s, in epoch %d", address, address.epoch)

    async def close(self) -> None:
        async with self._lock:
            await self._stop_leaving()
            if self._server is not None:
                await self._server.close()
            if self._link is not None:
                await self._link.close()

    def _use_owner(self, link: OwnerLink | None) -> None:
        app = self._service.app
        if isinstance(app, ForwardingApp):
            app.use_owner(None if link is None else link.open_http)

    async def _leave(self) -> None:
        """Take the workers of the last owner out of the pool once the own ones serve their models."""
        pool, models = self._service.pool, self._remote.models
        for _ in range(round(pool.policy.no_worker_timeout_s / POLL_INTERVAL_S)):
            if all(pool.serves(model) for model in models):
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        await self._remote.clear()

    async def _stop_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)
            self._leaving = None
            await self._remote.wait_removed()  # the names of its workers are free then
