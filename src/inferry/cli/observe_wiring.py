"""Makes the proxy of `inferry observe`, and reads what it has recorded. Part of the composition root."""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

import uvloop

from inferry.cli.listening import bind
from inferry.cli.observe_proxy import ObserveProxy
from inferry.domain.clock import SystemClock
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.domain.observed import UPSTREAM
from inferry.ingress.http import lifecycle
from inferry.ingress.http.connection import Connection
from inferry.ingress.http.server import Server
from inferry.ledger.recorder import Recorder
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from inferry.observe.observed_call import CallDescriber

log = logging.getLogger("inferry")

MAX_BODY_BYTES = 256 * 1024 * 1024
IDLE_TIMEOUT_S = 75.0
DRAIN_TIMEOUT_S = 30.0
MAX_ROWS = 1_000_000


def serve_proxy(
    upstream: str, host: str, port: int, database: str, lanes: Mapping[Lane, LanePolicy], *, forwards_admin: bool
) -> None:
    """Run the proxy until SIGTERM or SIGINT. Raises LedgerUnusable, or ConfigError where the port cannot be used."""
    (sock,) = bind(host, port, 1).sockets
    recorder = Recorder(AttemptStore(database))
    with sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        describer = CallDescriber(os.urandom(32), lanes)
        runner.run(run_proxy(upstream, sock, describer, recorder, forwards_admin=forwards_admin))


def read_observed(database: str) -> list[LedgerEntry]:
    """The latest rows of observed calls. Raises LedgerUnusable."""
    with open_queries(database) as ledger:
        return [entry for entry in ledger.jobs(limit=MAX_ROWS) if entry.worker == UPSTREAM]


async def run_proxy(
    upstream: str, sock: socket.socket, describer: CallDescriber, recorder: Recorder, *, forwards_admin: bool
) -> None:
    """Serve until SIGTERM or SIGINT, then complete the calls in flight."""
    loop, stop = asyncio.get_running_loop(), lifecycle.StopSignals()
    proxy = ObserveProxy(upstream, describer, recorder, SystemClock(), forwards_admin=forwards_admin)
    server = Server(
        proxy.serve, max_body_bytes=MAX_BODY_BYTES, body_timeout_s=IDLE_TIMEOUT_S, idle_timeout_s=IDLE_TIMEOUT_S
    )
    listener = await loop.create_server(lambda: Connection(server, loop), sock=sock, backlog=lifecycle.BACKLOG)
    log.info("observing %s on port %d", upstream, sock.getsockname()[1])
    lifecycle.tune_interpreter()
    try:
        with stop.installed():
            await stop.drain.wait()
            listener.close()
            idle, force = loop.create_task(server.wait_until_idle()), loop.create_task(stop.force.wait())
            await asyncio.wait({idle, force}, timeout=DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            force.cancel()
    finally:
        server.abort()
        proxy.close()
        await asyncio.to_thread(recorder.close)
