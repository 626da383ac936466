"""The ingress side of the link: one connection to the owner, made again whenever it is lost.

Everything belongs to one event loop. One task keeps the connection; messages are handled in its callbacks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from inferry.cluster import handshake
from inferry.cluster.frames import (
    Cancel,
    Cancelled,
    Catalog,
    Challenge,
    Failure,
    Finish,
    FrameError,
    Hello,
    Message,
    Piece,
    Placed,
    Purpose,
    Restart,
    Submit,
    TenantsChanged,
    Welcome,
)
from inferry.cluster.job_fields import job_to_fields
from inferry.cluster.link import LinkEnd
from inferry.domain.clock import Clock
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.workers.plan_completion import PlanCompletion
from inferry.workers.remote.open_jobs import OpenJobs
from inferry.workers.remote.resume_tracker import AssemblerFor

log = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.05
MAX_RETRY_S: Final = 0.5


class OwnerAddress(NamedTuple):
    """Where the owner listens: a Unix socket, or a host and port with the secret of the gateways.

    `epoch`: that of the ownership; an owner of an earlier one is refused.
    """

    path: Path | None = None
    host: str = ""
    port: int = 0
    secret: bytes | None = None
    epoch: int = 0

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else f"{self.host}:{self.port}"


class OwnerLink:
    """Jobs to the owner, items back.

    `admits_here`: quotas and budgets are checked by this process, so the owner does not. Callbacks run on the event
    loop: `on_change` when the connection or the catalog has changed, `on_tenants_changed` when the owner says so.
    """

    def __init__(
        self,
        address: OwnerAddress,
        clock: Clock,
        *,
        admits_here: bool = False,
        assembler_for: AssemblerFor = lambda model, stops: None,
    ) -> None:
        self.address = address
        self._clock = clock
        self._admits_here = admits_here
        self.jobs = OpenJobs(assembler_for)
        self.catalog: Catalog | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_tenants_changed: Callable[[], None] = lambda: None
        self._connection: IngressConnection | None = None
        self._http: list[asyncio.Transport] = []
        self._lost = asyncio.Event()
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        """Connect, and keep the connection until `close`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    async def wait_connected(self) -> None:
        await self._opened.wait()

    async def close(self) -> None:
        """Close all connections. Jobs and requests that have not ended are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        connection = self._connection
        self._disconnected("the connection to the owner was closed")
        if connection is not None:
            connection.close()
        for transport in self._http:
            transport.abort()

    def send(self, message: Message) -> None:
        """Send a message that has no answer; dropped while there is no connection."""
        if self._connection is not None:
            self._connection.send(message)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> bool:
        """Pass the job on; False where there is no connection."""
        connection = self._connection
        if connection is None:
            return False
        opened = self.jobs.add(job, emit, completion)
        fields = job_to_fields(job, self._clock.now())
        connection.send(Submit(opened.key, self._admits_here, fields), len(job.payload.body))
        return True

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Have the owner end jobs; returns those that it confirms to hold nothing for."""
        call, keys = self.jobs.begin_cancel(job_ids)
        if not keys or self._connection is None:
            return frozenset()
        self._connection.send(Cancel(call, keys))
        return await self.jobs.confirmed(call, keys)

    def drop(self, completion: PlanCompletion) -> None:
        """The plan was cancelled: its jobs end at the owner, and nothing of them is emitted."""
        keys = self.jobs.drop(completion)
        if keys:
            self.send(Cancel(0, keys))

    # -- the connection ----------------------------------------------------------------------------------------------

    async def open_http(self, peer: str, make_protocol: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """A connection to the owner's HTTP server for a client at this address. Raises OSError."""
        loop = asyncio.get_running_loop()
        opening = IngressConnection(loop, self.address, "http", peer)
        await self._connect(opening)
        try:
            async with asyncio.timeout(handshake.TIMEOUT_S):
                await opening.opened
        except TimeoutError:
            opening.abort()
            raise
        except handshake.HandshakeFailed as error:
            opening.abort()
            raise ConnectionError(str(error)) from None
        transport, unread = opening.detach()
        self._http = [*(one for one in self._http if not one.is_closing()), transport]
        protocol = make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if unread:
            protocol.data_received(unread)
        return transport

    async def _keep_connected(self) -> None:
        delay_s, last_error = FIRST_RETRY_S, ""
        while True:
            error = await self._connect_once()
            if error is None:
                delay_s, last_error = FIRST_RETRY_S, ""
                await self._lost.wait()
                continue
            if error != last_error:
                last_error = error
                log.warning("cannot connect to the owner at %s: %s", self.address, error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)

    async def _connect_once(self) -> str | None:
        """Connect; returns the error, or None."""
        self._lost.clear()
        connection = IngressConnection(asyncio.get_running_loop(), self.address, "jobs")
        connection.link = self
        try:
            await self._connect(connection)
            async with asyncio.timeout(handshake.TIMEOUT_S):
                await connection.opened
        except BaseException as error:
            connection.link = None
            connection.abort()  # also where the link was closed meanwhile: the owner's answer must not open it again
            if isinstance(error, (OSError, handshake.HandshakeFailed)):
                return str(error) or type(error).__name__
            raise
        return None

    async def _connect(self, connection: "IngressConnection") -> None:
        loop, address = asyncio.get_running_loop(), self.address
        if address.path is not None:
            await loop.create_unix_connection(lambda: connection, str(address.path))
        else:
            await loop.create_connection(lambda: connection, address.host, address.port)

    def connected(self, connection: "IngressConnection", catalog: Catalog) -> None:
        """The owner has sent its workers, at the start or after a change."""
        self.catalog = catalog
        if self._connection is None:
            log.info("connected to the owner at %s", self.address)
        self._connection = connection
        self._opened.set()
        self.on_change()

    def connection_lost(self, connection: "IngressConnection") -> None:
        if connection is self._connection:
            log.warning("lost the connection to the owner at %s with %d calls open", self.address, len(self.jobs))
            self._disconnected("the process that owns the workers was lost")
        self._lost.set()

    def _disconnected(self, reason: str) -> None:
        self._connection = None
        self._opened.clear()
        self.on_change()  # first: jobs that are offered again find no worker here
        self.jobs.fail_all(reason)


class IngressConnection(LinkEnd):
    """One connection to the owner. `opened` is done when the owner has proved itself."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, address: OwnerAddress, purpose: Purpose, peer: str = ""
    ) -> None:
        super().__init__(loop)
        self._address = address
        self._purpose = purpose
        self._peer = peer
        self._challenge: Challenge | None = None
        self._hello: Hello | None = None
        self.link: OwnerLink | None = None
        self.opened: asyncio.Future[None] = loop.create_future()

    def on_message(self, message: Message) -> None:
        link = self.link
        if isinstance(message, Piece):
            if link is not None:
                link.jobs.on_piece(message)
        elif not self.opened.done():
            self._greet(message)
        elif link is not None:
            self._on_other(link, message)

    def _on_other(self, link: OwnerLink, message: Message) -> None:
        jobs = link.jobs
        if isinstance(message, Placed):
            jobs.on_placed(message)
        elif isinstance(message, Finish):
            jobs.on_finish(message)
        elif isinstance(message, Failure):
            jobs.on_failure(message)
        elif isinstance(message, Restart):
            jobs.on_restart(message)
        elif isinstance(message, Cancelled):
            jobs.on_cancelled(message)
        elif isinstance(message, Catalog):
            link.connected(self, message)
        elif isinstance(message, TenantsChanged):
            link.on_tenants_changed()
        else:
            raise FrameError(f"the owner sent {type(message).__name__}")

    def _greet(self, message: Message) -> None:
        try:
            if isinstance(message, Challenge) and self._challenge is None:
                self._challenge = message
                self._hello = handshake.answer_challenge(self._address.secret, message, self._purpose, self._peer)
                self.send(self._hello)
                return
            if not isinstance(message, Welcome) or self._challenge is None or self._hello is None:
                raise handshake.HandshakeFailed("the owner did not answer the greeting")
            handshake.check_welcome(self._address.secret, self._challenge, self._hello, message)
            if message.epoch < self._address.epoch:
                raise handshake.HandshakeFailed("the owner's epoch is over")
        except handshake.HandshakeFailed as error:
            self._fail(error)
            raise
        self.opened.set_result(None)

    def on_lost(self) -> None:
        self._fail(ConnectionError("the owner closed the connection"))
        if self.link is not None:
            self.link.connection_lost(self)

    def _fail(self, error: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # retrieved: the waiter may be gone
