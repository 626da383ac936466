"""The HTTP server's life: listen, serve, drain, close."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Generator

from inferry.dispatch.gateway import Gateway
from inferry.ingress.app import App
from inferry.ingress.http.connection import Connection
from inferry.ingress.http.server import Server

log = logging.getLogger(__name__)

ABANDON_GRACE_S = 2.0
"""After the drain timeout: time for the last responses to reach clients."""
BACKLOG = 4096
LISTENERS = 16
"""Listeners on one socket: connections accepted per iteration of the event loop."""


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A bound socket; with `is_shared` other processes may bind the port too. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def raise_file_limit() -> None:
    """Raise the limit of open files to the machine's maximum: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tune_gc() -> None:
    """Exempt the objects that exist now from garbage collection, and collect less often: calls create few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class StopSignals:
    """The first SIGTERM or SIGINT starts a drain, the second ends it."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()

    def request(self) -> None:
        (self.force if self.drain.is_set() else self.drain).set()

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


@contextlib.contextmanager
def stop_at_eof(stop: StopSignals, lifeline: int | None) -> Generator[None, None, None]:
    """Drain when the other end of this pipe is closed: the process that started this one is gone."""
    if lifeline is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def closed() -> None:
        loop.remove_reader(lifeline)
        if not stop.drain.is_set():
            stop.request()

    loop.add_reader(lifeline, closed)
    try:
        yield
    finally:
        loop.remove_reader(lifeline)


async def serve(
    app: App,
    gateway: Gateway,
    sock: socket.socket,
    stop: StopSignals,
    *,
    idle_timeout_s: float,
    drain_timeout_s: float,
    use_server: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve until a stop signal, then drain: refuse new calls, finish the accepted ones, close."""
    loop = asyncio.get_running_loop()
    server = Server(
        app.serve,
        max_body_bytes=app.limits.max_body_bytes,
        body_timeout_s=app.limits.body_timeout_s,
        idle_timeout_s=idle_timeout_s,
        accepts_body=app.accepts_body,
        requests=app.count_requests(),
    )
    use_server(server)
    # uvloop accepts one connection per listener and iteration: with one listener a flood would delay other clients.
    listeners: list[asyncio.Server] = []
    for _ in range(LISTENERS):
        again = sock.dup()
        listeners.append(await loop.create_server(lambda: Connection(server, loop), sock=again, backlog=BACKLOG))
    try:
        await stop.drain.wait()
        await _drain(server, gateway, stop.force, drain_timeout_s)
    finally:
        for listener in listeners:
            listener.close()
        sock.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABANDON_GRACE_S):
                await server.close()
        server.abort()


async def _drain(server: Server, gateway: Gateway, force: asyncio.Event, grace_s: float) -> None:
    """Refuse new calls; return when every accepted call was answered completely, or after `grace_s` seconds."""
    log.info("draining: refusing new calls, waiting up to %.0f s for running ones (signal again to stop now)", grace_s)
    loop = asyncio.get_running_loop()

    async def finish_replies() -> None:
        await gateway.drain()
        await server.wait_until_idle()
        await server.close()

    draining, forcing = loop.create_task(finish_replies()), loop.create_task(force.wait())
    try:
        done, _ = await asyncio.wait({draining, forcing}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if draining not in done:
            log.warning("ending the remaining calls%s", "" if forcing in done else ": drain timeout reached")
            gateway.abandon()
            await asyncio.wait({draining}, timeout=ABANDON_GRACE_S)
            gateway.abandon(immediately=True)  # a worker that does not respond must not delay error responses
            await asyncio.wait({draining}, timeout=ABANDON_GRACE_S)
    finally:
        draining.cancel()
        forcing.cancel()
