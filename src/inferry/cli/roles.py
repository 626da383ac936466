"""The role of a gateway in its domain: it owns the workers, or passes jobs on to the gateway that does.

A change of role is a change of the pool's workers. Jobs of the workers that leave are lost as if these had failed, and
are retried or resumed by the workers that come. Until these are up, calls wait: the workers that leave stay in the pool
as down until then. What operators have drained and loaded at one owner, the next does to its own workers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from inferry.cli.cluster_wiring import RemoteWorkers, ServiceOwner, make_owner_server, open_link
from inferry.cli.ingress_tokenizers import IngressTokenizers
from inferry.cli.owned_workers import OwnedWorkers
from inferry.cli.wiring import Service
from inferry.cluster.catalog import catalog_of
from inferry.cluster.frames import Catalog
from inferry.cluster.owner_server import OwnerServer
from inferry.dispatch.values import OwnerState
from inferry.dispatch.workers_file import WorkersFileWatcher
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError, NoWorker
from inferry.domain.ports import Tokenizer, Worker
from inferry.ingress.forwarding import OpenHttp, OwnerForwarding
from inferry.ingress.member_app import no_owner
from inferry.workers.remote.owner_link import OwnerAddress, OwnerLink

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05

MakeWorkers = Callable[[], Awaitable[Sequence[tuple[Worker, str]]]]
"""The workers of the configuration, new, and the kind of each."""
ReadTokenizers = Callable[[], dict[str, Tokenizer]]
"""Reads the tokenizers of the configuration, in a thread."""
WatchFile = Callable[[OwnedWorkers], WorkersFileWatcher[Any]]
"""Keeps workers of a file among the owned ones."""


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
        tokenizers: dict[str, Tokenizer] | None = None,
        read_tokenizers: ReadTokenizers = dict,
        watch_file: WatchFile | None = None,
    ) -> None:
        self._service = service
        self._make_workers = make_workers
        self._watch_file = watch_file
        self._clock = clock
        self._listen = listen
        self._secret = secret
        self._tokenizers = {} if tokenizers is None else tokenizers  # shared, and filled later
        self._ingress_tokenizers = IngressTokenizers(self._tokenizers, read_tokenizers)
        self.owner = ServiceOwner(service)
        self.port: int | None = None
        self._server: OwnerServer | None = None
        self._link: OwnerLink | None = None
        self._remote = RemoteWorkers(service.pool, clock)
        self._owned = OwnedWorkers(service.pool)
        self._watching: WorkersFileWatcher[Any] | None = None
        self._lock = asyncio.Lock()
        self._last = Catalog(())
        """The workers of the last owner."""
        self._settling: asyncio.Future[Any] | None = None
        self._use_owner(no_owner)

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
                self._owned.may_send = may_send
            else:
                try:
                    await self._own(epoch, may_send)
                except BaseException:
                    await self._disown()
                    raise
            log.info("this gateway owns the workers, in epoch %d", epoch)

    async def _own(self, epoch: int, may_send: Callable[[], bool]) -> None:
        await self._ingress_tokenizers.close()
        workers = await self._make_workers()
        self._note_catalog()
        self._service.gateway.take_over(OwnerState(self._last.adapters, self._last.desired))
        self._owned.may_send, self._owned.drained = may_send, set(self._last.drained)
        for worker, kind in workers:
            self._owned.add(worker, kind)
        if self._watch_file is not None:
            self._watching = self._watch_file(self._owned)
            await self._watching.poll()
            self._watching.start()
        if self._link is not None:
            await self._link.close()  # its jobs are offered again
            self._link = None
        self._use_owner(None)
        server = self._server = make_owner_server(self._service, self.owner, epoch=epoch, secret=self._secret)
        if isinstance(self._listen, Path):
            await server.listen_unix(self._listen)
        else:
            self.port = await server.listen_tcp(*self._listen)
        self._settling = asyncio.gather(self._leave(), self._restore_adapters())

    async def _disown(self) -> None:
        """Take the own workers out of the pool and disconnect other gateways: their jobs are theirs to resume."""
        server, self._server = self._server, None
        self._use_owner(no_owner)
        if server is not None:
            await server.close()
        await self._drop_workers()

    async def _drop_workers(self) -> None:
        await self._stop_watching()
        await self._owned.clear()

    async def _stop_watching(self) -> None:
        if self._watching is not None:
            await self._watching.close()
            self._watching = None

    async def become_ingress(self, address: OwnerAddress) -> None:
        """Pass jobs on to the owner at this address. Whatever the own workers run is dropped there and resumed."""
        async with self._lock:
            await self._stop_settling()
            self._note_catalog()
            if self._server is not None:
                await self._server.close()  # first: jobs of other gateways are theirs to resume
                self._server = None
            former, link = self._link, open_link(address, self._tokenizers, self._clock, admits_here=True)
            self._link = link
            self._use_owner(link.open_http)
            self._remote.expect(catalog_of(self._service.gateway), link)
            self._remote.use(link)
            self._ingress_tokenizers.follow(link)
            link.start()
            if former is not None:
                await former.close()
            await self._drop_workers()
            log.info("the workers are owned by the gateway at %s, in epoch %d", address, address.epoch)

    async def close(self) -> None:
        async with self._lock:
            await self._stop_settling()
            await self._stop_watching()
            await self._ingress_tokenizers.close()
            if self._server is not None:
                await self._server.close()
            if self._link is not None:
                await self._link.close()

    def _use_owner(self, open_http: OpenHttp | None) -> None:
        app = self._service.app
        if isinstance(app, OwnerForwarding):
            app.use_owner(open_http)

    def _note_catalog(self) -> None:
        if self._server is not None:
            self._last = catalog_of(self._service.gateway)
        elif self._link is not None and self._link.catalog is not None:
            self._last = self._link.catalog

    async def _leave(self) -> None:
        """Take the workers of the last owner out of the pool once the own ones serve their models."""
        pool, models = self._service.pool, self._remote.models
        for _ in range(round(pool.policy.no_worker_timeout_s / POLL_INTERVAL_S)):
            if all(pool.serves(model) for model in models):
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        await self._remote.clear()

    async def _restore_adapters(self) -> None:
        """Load the adapters of the last owner, as soon as the own workers can."""
        adapters = self._service.gateway.adapters
        for name in list(adapters.wanted):
            while name in adapters.wanted:
                try:
                    await adapters.restore(name)
                except NoWorker:
                    await asyncio.sleep(POLL_INTERVAL_S)  # an engine has not started yet
                    continue
                except GatewayError as error:
                    log.error("adapter %s of the last owner was not loaded: %s", name, error)
                break

    async def _stop_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
            self._settling = None
            await self._remote.wait_removed()  # the names of its workers are free then
