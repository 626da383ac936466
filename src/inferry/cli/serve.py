"""`inferry serve`: one gateway process, or the owner and the ingress processes of one port."""

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from inferry.cli.checkout import is_compiled
from inferry.cli.config.checks import check_host
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.tenants import exposure_error
from inferry.cli.processes import Supervisor
from inferry.domain.ledger_urls import IN_MEMORY, shown_ledger_url

if TYPE_CHECKING:  # imported by each process for itself
    from collections.abc import Coroutine

    from inferry.dispatch.gateway import Gateway
    from inferry.domain.ports import Tokenizer
    from inferry.ingress.app import App
    from inferry.ingress.http.lifecycle import StopSignals
    from inferry.ingress.http.server import Server

log = logging.getLogger("inferry")

SOCKET_NAME = "owner.sock"


class Listener(NamedTuple):
    """Where clients connect. `is_shared`: several processes listen on the port."""

    host: str
    port: int
    is_shared: bool = False

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def run_server(config: Config, host: str, port: int, processes: int = 1) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError."""
    if (problem := check_host(host)) is not None:
        raise ConfigError(f"--host {problem}")
    if config.ledger == IN_MEMORY:
        if processes > 1:
            raise ConfigError("several processes cannot share a ledger in memory: set `ledger` to a file or a database")
        log.warning("the ledger is in memory: rows, keys and budgets are lost when the process ends")
    if processes > 1 and config.cluster.listen is not None:
        raise ConfigError("--workers is for gateways that do not share their workers: remove cluster.listen")
    if processes == 1:
        run_alone(config, Listener(host, port))
        return 0
    # Nothing of the service is imported before the processes are forked: each has its own prefix of job ids.
    with reserved_port(host, port) as reserved, tempfile.TemporaryDirectory(prefix="inferry-") as directory:
        listener = Listener(host, reserved.getsockname()[1], is_shared=True)
        path = Path(directory) / SOCKET_NAME
        roles: list[tuple[str, Callable[[int], None]]] = [
            ("owner", lambda lifeline: run_owner(config, listener, path, lifeline))
        ]
        roles += [
            (f"ingress-{number}", lambda lifeline: run_ingress(config, listener, path, lifeline))
            for number in range(1, processes)
        ]
        return Supervisor(roles).run()


def reserved_port(host: str, port: int) -> socket.socket:
    """A socket that keeps the port for the processes that share it. It does not listen. Raises ConfigError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A port on which another program listens is refused, because that one does not share it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot serve on {host} port {port}: {error.strerror or error}") from None
    return sock


def run_alone(config: Config, listener: Listener) -> None:
    """The only gateway process."""
    from inferry.cli import wiring

    async def main(sock: socket.socket) -> None:
        await _serve_whole(config, listener, sock, None, None)

    _run(listener, wiring.exclusive_use(config), main)


def run_owner(config: Config, listener: Listener, path: Path, lifeline: int) -> None:
    """The process that owns the workers, the database and all limits."""
    from inferry.cli import wiring

    async def main(sock: socket.socket) -> None:
        await _serve_whole(config, listener, sock, path, lifeline)

    _run(listener, wiring.exclusive_use(config), main)


def run_ingress(config: Config, listener: Listener, path: Path, lifeline: int) -> None:
    """A process that reads requests and writes responses; the owner does the rest."""

    async def main(sock: socket.socket) -> None:
        from inferry.cli import cluster_wiring

        tokenizers: dict[str, Tokenizer] = {}
        link = cluster_wiring.open_local_link(path, tokenizers)
        stop = lifecycle.StopSignals()
        with stop.installed(), lifecycle.stop_at_eof(stop, lifeline):
            link.start()
            connecting = asyncio.ensure_future(link.wait_connected())
            stopping = asyncio.ensure_future(stop.drain.wait())
            # Not before the owner has prepared the database.
            await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            connecting.cancel()
            stopping.cancel()
            if stop.drain.is_set():
                await link.close()
                return
            service = cluster_wiring.build_ingress(config, link, tokenizers)
            try:
                service.start()
                log.info("ingress process %d serves %s", os.getpid(), listener.url)
                lifecycle.tune_gc()
                await _serve_http(config, service.app, service.gateway, sock, stop)
            finally:
                await service.close()

    from inferry.ingress.http import lifecycle

    _run(listener, nullcontext(), main)


async def _serve_whole(
    config: Config, listener: Listener, sock: socket.socket, path: Path | None, lifeline: int | None
) -> None:
    """Serve with everything; with a `path`, for ingress processes too."""
    from inferry.cli import cluster_wiring, election_wiring, wiring
    from inferry.domain.clock import SystemClock
    from inferry.ingress.http import lifecycle

    clock, tokenizers = SystemClock(), dict["str", "Tokenizer"]()
    if config.cluster.listen is None:
        service = wiring.build(config, clock)
    else:
        service = election_wiring.build_service(config, clock, tokenizers)
    member = None if service.sharing is None else election_wiring.join_cluster(config, service, clock, tokenizers)
    count = len(service.pool.names())
    build_kind = "compiled" if is_compiled() else "plain Python"
    log.info("starting %d worker%s; hot path: %s", count, "" if count == 1 else "s", build_kind)
    owner = cluster_wiring.ServiceOwner(service)
    server = None if path is None else cluster_wiring.make_owner_server(service, owner)
    try:
        refusal = exposure_error(config.auth, listener.host, service.tenants.is_auth_required)
        if refusal is not None:
            raise ConfigError(refusal)
        service.start()
        if member is not None:
            member.start()
        if server is not None and path is not None:
            await server.listen_unix(path)
        url = listener.url if listener.port else f"{listener.url.rpartition(':')[0]}:{sock.getsockname()[1]}"
        log.info("listening on %s (OpenAI base URL %s/v1); ledger %s", url, url, shown_ledger_url(config.ledger))
        lifecycle.tune_gc()
        stop = lifecycle.StopSignals()
        with stop.installed(), lifecycle.stop_at_eof(stop, lifeline):
            await _serve_http(config, service.app, service.gateway, sock, stop, owner.use_http)
    finally:
        if server is not None:
            await server.close()
        if member is not None:
            await member.close()
        await service.close()
    log.info("stopped")


async def _serve_http(
    config: Config,
    app: "App",
    gateway: "Gateway",
    sock: socket.socket,
    stop: "StopSignals",
    use_server: "Callable[[Server], None]" = lambda server: None,
) -> None:
    from inferry.ingress.http import lifecycle

    await lifecycle.serve(
        app,
        gateway,
        sock,
        stop,
        idle_timeout_s=config.server.idle_timeout_s,
        drain_timeout_s=config.server.drain_timeout_s,
        use_server=use_server,
    )


def _run(
    listener: Listener,
    held: AbstractContextManager[None],
    main: "Callable[[socket.socket], Coroutine[None, None, None]]",
) -> None:
    import uvloop

    from inferry.ingress.http import lifecycle

    lifecycle.raise_file_limit()
    try:
        sock = lifecycle.bind(listener.host, listener.port, is_shared=listener.is_shared)
    except OSError as error:
        raise ConfigError(f"cannot serve on {listener.host} port {listener.port}: {error.strerror or error}") from None
    try:
        with held, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main(sock))
    finally:
        sock.close()
