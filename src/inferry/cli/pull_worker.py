"""`inferry worker`: engines of a host that cannot be reached from outside, for batches and async jobs.

The process opens no port. It connects to Redis, where ids of work wait, and to gateways, which have the content.
"""

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from inferry.cli.config.checks import check_url
from inferry.cli.config.cluster import redis_url_problem
from inferry.cli.config.environment import WORKER_KEY
from inferry.cli.config.loader import load, parse
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.workers import HTTP_KINDS, UnsaltedWorkerConfig
from inferry.cli.terminal import configure_logging, fail
from inferry.domain.ledger_urls import IN_MEMORY

log = logging.getLogger("inferry")

REDIS_VARIABLE = "INFERRY_CLUSTER__REDIS"
MIN_KEY_CHARS = 16
_UNSALTED_KINDS = {kind.__struct_config__.tag for kind in HTTP_KINDS if issubclass(kind, UnsaltedWorkerConfig)}


def worker(
    model: Annotated[
        str | None, typer.Option("--model", help="Model that the engine at --upstream serves, as calls name it.")
    ] = None,
    gateway: Annotated[
        list[str] | None, typer.Option("--gateway", help="URL of a gateway; several: the next where one is away.")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            "--redis", help=f"Redis of the gateways; default: {REDIS_VARIABLE}, which process lists do not show."
        ),
    ] = None,
    upstream: Annotated[
        str | None, typer.Option("--upstream", help="URL of an HTTP engine that this host reaches.")
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help="Kind of the engine at --upstream, as in `workers`.")] = "vllm",
    isolation: Annotated[
        str | None,
        typer.Option(
            "--isolation",
            metavar="none",
            help="As in `workers`: `none` lets tenants share the engine's prefix cache, where it cannot be salted.",
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Configuration with `workers` of its own, instead."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of this worker in metrics and the ledger; default: the host's.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Calls in flight.")] = 64,
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0, max=86_400, help="Seconds that running calls get after SIGTERM.")
    ] = 30.0,
    log_level: Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")] = "info",
) -> None:
    """Run batch items and async jobs of `cluster.pull_models` on this host's engine, until SIGTERM."""
    configure_logging(log_level)
    name = name or socket.gethostname()
    redis = redis or os.environ.get(REDIS_VARIABLE)
    key = os.environ.get(WORKER_KEY, "")
    if redis is None or not gateway:
        fail("--redis and --gateway are required")
    if len(key) < MIN_KEY_CHARS:
        fail(f"{WORKER_KEY} must have the gateways' worker key (cluster.worker_key_env)")
    try:
        check_addresses(redis, gateway)
        config = worker_config(config_file, upstream, kind, isolation, model, name)
        asyncio.run(_run(config, redis, gateway, key, name, concurrency, drain_s))
    except ConfigError as error:
        fail(str(error))


def check_addresses(redis: str, gateways: list[str]) -> None:
    """Raises ConfigError."""
    if (problem := redis_url_problem(redis)) is not None:
        raise ConfigError(f"--redis {problem}")
    for url in gateways:
        if (problem := check_url(url)) is not None:
            raise ConfigError(f"--gateway {problem}")


def worker_config(
    file: Path | None, upstream: str | None, kind: str, isolation: str | None, model: str | None, name: str
) -> Config:
    """Raises ConfigError."""
    if (file is None) == (upstream is None) or (upstream is not None) != (model is not None):
        raise ConfigError("give --upstream with --model, or --config with `workers`")
    if upstream is None:
        if isolation is not None:
            raise ConfigError("--isolation belongs to --upstream; with --config it is a key of `workers`")
        # Redis is the command's own option: as a key of the configuration it would make this a gateway.
        env = {name: text for name, text in os.environ.items() if name != REDIS_VARIABLE}
        return msgspec.structs.replace(load(file, env), ledger=IN_MEMORY)
    if isolation is None and kind in _UNSALTED_KINDS:
        raise ConfigError(
            f"an engine of kind {kind} cannot salt its prefix cache, so tenants would share it: give --isolation none, "
            "or reserve it for one tenant with `pool` in a file for --config"
        )
    worker = {"kind": kind, "name": name, "url": upstream, "models": [model]}
    if isolation is not None:
        worker["isolation"] = isolation
    return parse({"ledger": IN_MEMORY, "workers": [worker]})


async def _run(
    config: Config, redis: str, gateways: list[str], key: str, name: str, concurrency: int, drain_s: float
) -> None:
    from inferry.cli.pull_wiring import PullWorker
    from inferry.durable.gateway_work import NoGateway
    from inferry.ingress.http.lifecycle import StopSignals

    pulling = PullWorker(config, redis, gateways, key, f"{name}-{os.getpid()}", concurrency)
    stop = StopSignals()
    with stop.installed():
        stopping = asyncio.ensure_future(stop.drain.wait())
        try:
            starting = asyncio.ensure_future(pulling.start())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                log.info("pulling work of %s; %d calls in flight at most", ", ".join(pulling.models), concurrency)
                await stopping
                log.info("draining: %d calls in flight", pulling.runner.in_flight)
            starting.cancel()
        except NoGateway as error:
            raise ConfigError(f"no gateway accepts this worker: {error}") from None
        finally:
            stopping.cancel()
            await pulling.close(drain_s)
    log.info("stopped")
