"""`inferry serve`: one gateway process, or the owner and the ingress processes of one port."""

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from inferry.cli import upgrade
from inferry.cli.checkout import is_compiled
from inferry.cli.config.checks import check_host
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.tenants import advise_on_tenants, exposure_error
from inferry.cli.listening import bind, inherited
from inferry.cli.processes import Role, Supervisor
from inferry.cli.sd_notify import READY, STOPPING, notify
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
    """Where clients connect. `is_held`: the socket stays open when all processes of the gateway have ended.

    `is_inherited`: it was open before, so that calls may wait in its queue.
    """

    host: str
    port: int
    sock: socket.socket
    is_held: bool = False
    is_inherited: bool = False

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


MayUpgrade = Callable[[], bool]
"""Whether the gateway may be replaced by what is on disk. None in its place: SIGHUP is not handled."""


def run_server(config: Config, host: str, port: int, processes: int = 1, config_file: Path | None = None) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError."""
    if (problem := check_host(host)) is not None:
        raise ConfigError(f"--host {problem}")
    if config.ledger == IN_MEMORY:
        if processes > 1:
            raise ConfigError("several processes cannot share a ledger in memory: set `ledger` to a file or a database")
        log.warning("the ledger is in memory: rows, keys and budgets are lost when the process ends")
    for message in advise_on_tenants(config.tenants, config.prices, config.workers):
        log.warning("%s", message)
    if processes > 1 and config.cluster.listen is not None:
        message = (
            "--workers does not go together with cluster.listen: on a host with several cores start several gateways"
        )
        raise ConfigError(f"{message}, each with its own port and its own cluster.listen, or remove cluster.listen")
    given = inherited(os.environ)
    listening = given or bind(host, port, processes)
    is_inherited = given is not None

    def may_upgrade() -> bool:
        return upgrade.check(config_file)

    can_upgrade = may_upgrade if upgrade.is_possible() else None
    try:
        listeners = [_listener(sock, listening.is_held, is_inherited) for sock in listening.sockets]
        if processes == 1:
            status, is_upgrade = 0, run_alone(config, listeners[0], can_upgrade)
        else:
            status, is_upgrade = _run_processes(config, listeners, processes, can_upgrade)
        if is_upgrade:
            upgrade.restart(listening)
        return status
    finally:
        for sock in listening.sockets:
            sock.close()


def _listener(sock: socket.socket, is_held: bool, is_inherited: bool) -> Listener:
    """Raises ConfigError for a socket that is not TCP."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        raise ConfigError("the inherited socket is not TCP: set ListenStream of the socket unit to ADDRESS:PORT")
    host, port = sock.getsockname()[:2]
    return Listener(host, port, sock, is_held, is_inherited)


def _run_processes(
    config: Config, listeners: Sequence[Listener], processes: int, may_upgrade: MayUpgrade | None
) -> tuple[int, bool]:
    """Run a supervisor with its processes; returns the exit status, and whether an upgrade follows."""
    # Nothing of the service is imported before the processes are forked: each has its own prefix of job ids.
    with tempfile.TemporaryDirectory(prefix="inferry-") as directory:
        path = Path(directory) / SOCKET_NAME
        can_upgrade = may_upgrade is not None
        roles: list[Role] = [("owner", partial(run_owner, config, listeners[0], path, can_upgrade))]
        for number in range(1, processes):
            listener = listeners[number % len(listeners)]
            roles.append((f"ingress-{number}", partial(run_ingress, config, listener, path, can_upgrade)))
        supervisor = Supervisor(roles, may_upgrade)
        return supervisor.run(), supervisor.is_upgrade


def run_alone(config: Config, listener: Listener, may_upgrade: MayUpgrade | None) -> bool:
    """The only gateway process. Returns whether an upgrade follows."""
    from inferry.cli import wiring
    from inferry.ingress.http import lifecycle

    is_upgrade = False

    async def may_upgrade_now() -> bool:
        return may_upgrade is not None and await asyncio.to_thread(may_upgrade)

    async def main() -> None:
        nonlocal is_upgrade
        stop = lifecycle.StopSignals(
            is_succeeded=listener.is_held, may_upgrade=None if may_upgrade is None else may_upgrade_now
        )
        telling = asyncio.get_running_loop().create_task(_tell_stopping(stop))
        await _serve_whole(config, listener, stop, on_listening=lambda: notify(READY))
        telling.cancel()
        is_upgrade = stop.is_upgrade

    _run(wiring.exclusive_use(config), main)
    return is_upgrade


async def _tell_stopping(stop: "StopSignals") -> None:
    await stop.drain.wait()
    if not stop.is_upgrade:
        notify(STOPPING)


async def _told_by_supervisor() -> bool:
    """The supervisor has checked that the gateway may be upgraded."""
    return True


def run_owner(
    config: Config, listener: Listener, path: Path, can_upgrade: bool, lifeline: int, is_restart: bool
) -> None:
    """The process that owns the workers, the database and all limits."""
    from inferry.cli import wiring
    from inferry.ingress.http import lifecycle

    listener = listener._replace(is_inherited=listener.is_inherited or is_restart)

    async def main() -> None:
        stop = lifecycle.StopSignals(
            is_succeeded=listener.is_held, may_upgrade=_told_by_supervisor if can_upgrade else None
        )
        await _serve_whole(config, listener, stop, path, lifeline)

    _run(wiring.exclusive_use(config), main)


def run_ingress(
    config: Config, listener: Listener, path: Path, can_upgrade: bool, lifeline: int, is_restart: bool
) -> None:
    """A process that reads requests and writes responses; the owner does the rest."""
    from inferry.ingress.http import lifecycle

    async def main() -> None:
        from inferry.cli import cluster_wiring

        tokenizers: dict[str, Tokenizer] = {}
        link = cluster_wiring.open_local_link(path, tokenizers)
        stop = lifecycle.StopSignals(
            is_succeeded=listener.is_held, may_upgrade=_told_by_supervisor if can_upgrade else None
        )
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
                lifecycle.tune_interpreter()
                if listener.is_inherited or is_restart:
                    await lifecycle.wait_for_workers(service.gateway, stop, config.health.no_worker_timeout_s)
                await _serve_http(config, service.app, service.gateway, listener.sock, stop)
            finally:
                await service.close()

    _run(nullcontext(), main)


async def _serve_whole(
    config: Config,
    listener: Listener,
    stop: "StopSignals",
    path: Path | None = None,
    lifeline: int | None = None,
    on_listening: Callable[[], None] = lambda: None,
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
    roles = None if member is None else member.roles
    owner = cluster_wiring.ServiceOwner(service) if roles is None else roles.owner
    server = None if path is None else cluster_wiring.make_owner_server(service, owner)

    async def hand_over() -> None:
        if server is not None:
            await server.wait_until_left()  # the ingress processes drain too
        if member is not None:
            await member.hand_over()

    try:
        refusal = exposure_error(config.auth, listener.host, service.tenants.is_auth_required)
        if refusal is not None:
            raise ConfigError(refusal)
        service.start()
        if member is not None:
            member.start()
        if server is not None and path is not None:
            await server.listen_unix(path)
        url = listener.url
        log.info("listening on %s (OpenAI base URL %s/v1); ledger %s", url, url, shown_ledger_url(config.ledger))
        lifecycle.tune_interpreter()
        with stop.installed(), lifecycle.stop_at_eof(stop, lifeline):
            if listener.is_inherited:
                await lifecycle.wait_for_workers(service.gateway, stop, config.health.no_worker_timeout_s)
            await _serve_http(
                config, service.app, service.gateway, listener.sock, stop, owner.use_http, on_listening, hand_over
            )
    finally:
        if server is not None:
            await server.close()
        if member is not None:
            await member.close()
        await service.close()
    log.info("stopped")


async def _nothing() -> None:
    """An ingress process has nothing to hand over."""


async def _serve_http(
    config: Config,
    app: "App",
    gateway: "Gateway",
    sock: socket.socket,
    stop: "StopSignals",
    use_server: "Callable[[Server], None]" = lambda server: None,
    on_listening: Callable[[], None] = lambda: None,
    hand_over: Callable[[], Awaitable[None]] = _nothing,
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
        on_listening=on_listening,
        hand_over=hand_over,
    )


def _run(held: AbstractContextManager[None], main: "Callable[[], Coroutine[None, None, None]]") -> None:
    import uvloop

    from inferry.ingress.http import lifecycle

    lifecycle.raise_file_limit()
    with held, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
