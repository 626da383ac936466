"""The HTTP server: it listens, and drains what was accepted before it leaves."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Generator

from inferry.dispatch.gateway import Gateway
from inferry.ingress.app import App
from inferry.ingress.http.connection import Connection
from inferry.ingress.http.server import Server

log = logging.getLogger(__name__)

ABANDON_GRACE_S = 2.0
"""Once the grace is over: time for clients to be told."""
BACKLOG = 4096
LISTENERS = 16
"""Connections that are accepted in one turn of the event loop."""


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


def tune_gc() -> None:
    """What is there by now stays for good, and calls make no cycles worth looking for after every few of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class StopSignals:
    """The first SIGTERM or SIGINT asks for a drain, the second for an end to waiting."""

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


async def serve(
    app: App,
    gateway: Gateway,
    sock: socket.socket,
    stop: StopSignals,
    *,
    idle_timeout_s: float,
    drain_timeout_s: float,
) -> None:
    """Serve until told to stop, then drain: refuse new work, finish what was accepted, leave."""
    loop = asyncio.get_running_loop()
    server = Server(
        app.serve,
        max_body_bytes=app.limits.max_body_bytes,
        body_timeout_s=app.limits.body_timeout_s,
        idle_timeout_s=idle_timeout_s,
        accepts_body=app.accepts_body,
    )
    # uvloop accepts one connection of a listener in a turn: a flood of them would keep the next client waiting.
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
    """Refuse new work; return when every accepted call has been answered to its last byte, or the grace is over."""
    log.info("draining: no new work, up to %.0f s for what is running (signal again to stop now)", grace_s)
    loop = asyncio.get_running_loop()

    async def finish_replies() -> None:
        await gateway.drain()
        await server.wait_until_idle()
        await server.close()

    draining, forcing = loop.create_task(finish_replies()), loop.create_task(force.wait())
    try:
        done, _ = await asyncio.wait({draining, forcing}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if draining not in done:
            log.warning("ending what is left%s", "" if forcing in done else ": the grace is over")
            gateway.abandon()
            await asyncio.wait({draining}, timeout=ABANDON_GRACE_S)
            gateway.abandon(immediately=True)  # workers that do not answer must not keep clients from being told
            await asyncio.wait({draining}, timeout=ABANDON_GRACE_S)
    finally:
        draining.cancel()
        forcing.cancel()
