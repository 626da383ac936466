"""The HTTP server: uvicorn, with idle connections bounded and a drain that finishes what was accepted."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Generator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferry.dispatch.gateway import Gateway
from inferry.ingress.app import App

log = logging.getLogger(__name__)

AFTER_ABANDON_S = 2.0
"""Once the grace is over: time for clients to be told."""
LARGEST_HEADERS = 65_536
MOST_PIPELINED = 16

_HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: 132\r\n\r\n"
    b'{"error":{"message":"the headers are larger than 65536 bytes","type":"invalid_request_error","param":null,'
    b'"code":"invalid_request"}}'
)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP with what it leaves open bounded.

    A connection that sends nothing, stops within its headers, or trickles something that is no request is closed after
    the keep-alive timeout. Headers have a size. A connection is read on while requests are pipelined behind the one
    being answered, because only reading shows that the client has left.
    """

    _headers_due: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)
        if self._headers_due is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()  # more came, but nothing that began a request
        if self._headers_due is not None and self._header_bytes > LARGEST_HEADERS:
            self.transport.write(_HEADERS_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._expect_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_expecting()
        super().on_headers_complete()
        if len(self.pipeline) > MOST_PIPELINED:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._headers_due is None and not self.transport.is_closing():
            self._header_bytes = 0
            self._headers_due = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_expecting(self) -> None:
        self._header_bytes = 0
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal here starts a drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or an OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def raise_file_limit() -> None:
    """As many connections as the machine allows: a gateway is mostly open sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class StopSignals:
    """The first SIGTERM or SIGINT asks for a drain, the second for an end to waiting."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()

    def request(self) -> None:
        (self.hurry if self.drain.is_set() else self.drain).set()

    @contextlib.contextmanager
    def installed(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def serve(
    app: App,
    gateway: Gateway,
    sock: socket.socket,
    stop: StopSignals,
    *,
    idle_timeout_s: float,
    drain_grace_s: float,
) -> None:
    """Serve until told to stop, then drain: refuse new work, finish what was accepted, leave."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        backlog=4096,
        timeout_keep_alive=max(1, int(idle_timeout_s)),
        timeout_graceful_shutdown=max(1, int(AFTER_ABANDON_S)),
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    serving = loop.create_task(server.serve(sockets=[sock]))
    stopping = loop.create_task(stop.drain.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.drain.is_set():
            await _drain(app, gateway, stop.hurry, drain_grace_s)
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()


async def _drain(app: App, gateway: Gateway, hurry: asyncio.Event, grace_s: float) -> None:
    """Refuse new work; return when every accepted call has been answered to its last byte, or the grace is over."""
    log.info("draining: no new work, up to %.0f s for what is running (signal again to stop now)", grace_s)
    loop = asyncio.get_running_loop()

    async def answered() -> None:
        await gateway.drain()
        await app.wait_until_answered()

    draining, hurrying = loop.create_task(answered()), loop.create_task(hurry.wait())
    try:
        done, _ = await asyncio.wait({draining, hurrying}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if draining not in done:
            log.warning("ending what is left%s", "" if hurrying in done else ": the grace is over")
            gateway.abandon()
            await asyncio.wait({draining}, timeout=AFTER_ABANDON_S)
            gateway.abandon(at_once=True)  # workers that do not answer must not keep clients from being told
            await asyncio.wait({draining}, timeout=AFTER_ABANDON_S)
    finally:
        draining.cancel()
        hurrying.cancel()
