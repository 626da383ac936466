"""The command line: parse options, call wiring, print."""

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler

from inferry._version import __version__
from inferry.cli.alerts import alerts_app
from inferry.cli.bench import bench
from inferry.cli.calibrate import calibrate
from inferry.cli.callback_secrets import callback_secrets_app
from inferry.cli.checkout import is_compiled
from inferry.cli.config.alerts import check_webhook_secret
from inferry.cli.config.checks import check_host
from inferry.cli.config.loader import dump, duplicate_names, load, load_workers
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.secrets import check_secret_variables
from inferry.cli.config.tenants import AuthConfig, advise_on_tenants, check_pools, exposure_error
from inferry.cli.doctor import doctor
from inferry.cli.keys import keys_app, tenants_app
from inferry.cli.ledger import ledger_app
from inferry.cli.models import models_app
from inferry.cli.plan import plan_app
from inferry.cli.profile import profile
from inferry.cli.ray import ray_app
from inferry.cli.run_batch import run_batch
from inferry.cli.simulate import simulate
from inferry.cli.terminal import fail
from inferry.cli.top import top
from inferry.cli.workers import workers_app
from inferry.domain.ledger_urls import IN_MEMORY, shown_ledger_url
from inferry.domain.reports import RunBudget, run_budgets

app = typer.Typer(
    name="inferry",
    help="Inference gateway and scheduler for fleets of LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

log = logging.getLogger("inferry")


def _ledger_url(path: Path | None) -> str:
    """The ledger URL of a configuration."""
    return _load(path).ledger


def _run_budgets(path: Path | None) -> dict[str, RunBudget]:
    """The run budgets in a configuration."""
    return run_budgets(_load(path).configured_tenants().values())


app.add_typer(ledger_app(_ledger_url, _run_budgets), name="ledger")
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.add_typer(callback_secrets_app, name="callback-secrets")
app.add_typer(alerts_app, name="alerts")
app.add_typer(models_app, name="models")
app.add_typer(plan_app, name="plan")
app.add_typer(workers_app, name="workers")
app.add_typer(ray_app, name="ray")
app.command()(simulate)
app.command()(calibrate)
app.command()(bench)
app.command()(profile)
app.command()(doctor)
app.command()(top)
app.command("run-batch")(run_batch)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML configuration file; every key has a default.", metavar="FILE"),
]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"inferry {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    pass


@app.command()
def serve(
    config_file: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (config: server.host).")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Port to listen on (config: server.port); 0 selects a free one."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")] = "info",
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Disable authentication on any address (config: auth).")
    ] = False,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C, then drain."""
    _configure_logging(log_level)
    config = _load(config_file)
    if no_auth:
        config = msgspec.structs.replace(config, auth=AuthConfig(mode="off", allow_remote=True))
    try:
        _run_server(config, config.server.host if host is None else host, config.server.port if port is None else port)
    except ConfigError as error:
        fail(str(error))


@app.command("check-config")
def check_config(
    config_file: ConfigFile = None,
    query: Annotated[
        bool, typer.Option("--ask", help="Also query the HTTP workers for their features and settings.")
    ] = (False),
) -> None:
    """Validate a configuration and print it with defaults, and what prevents its SLO targets from being met."""
    from inferry.cli import worker_wiring

    config = _load(config_file)
    typer.echo(dump(config), nl=False)
    missing = [*check_secret_variables(config.workers, "workers", os.environ)]
    if query and missing:
        fail("; ".join(missing))
    try:
        for message in asyncio.run(worker_wiring.query_engines(config)) if query else worker_wiring.advise(config):
            typer.echo(f"# {message}")
    except ConfigError as error:
        fail(str(error))
    for message in advise_on_tenants(config.tenants, config.prices, config.workers):
        typer.echo(f"# {message}")
    if config.workers_file is not None:
        try:
            watched = load_workers(Path(config.workers_file))
        except ConfigError as error:
            fail(str(error))
        duplicates = duplicate_names(config, watched)
        if duplicates:
            fail(f"{config.workers_file}: names already used in the configuration: {', '.join(duplicates)}")
        names = ", ".join(f"{worker.name} ({worker.__struct_config__.tag})" for worker in watched)
        typer.echo(f"# workers_file has {names or 'no workers'}")
        missing = [*missing, *check_secret_variables(watched, config.workers_file, os.environ)]
        missing = [*missing, *check_pools(config.tenants, (*config.workers, *watched))]
    missing = [*missing, *check_webhook_secret(config.alerts)]
    if missing:
        fail("; ".join(missing))


def _run_server(config: Config, host: str, port: int) -> None:
    import uvloop

    from inferry.cli import wiring
    from inferry.ingress.http import lifecycle

    lifecycle.raise_file_limit()
    if (problem := check_host(host)) is not None:
        raise ConfigError(f"--host {problem}")
    try:
        sock = lifecycle.bind(host, port)
    except OSError as error:
        raise ConfigError(f"cannot serve on {host} port {port}: {error.strerror or error}") from None
    if config.ledger == IN_MEMORY:
        log.warning("the ledger is in memory: rows, keys and budgets are lost when the process ends")

    async def main() -> None:
        service = wiring.build(config)
        count = len(service.pool.names())
        build_kind = "compiled" if is_compiled() else "plain Python"
        log.info("starting %d worker%s; hot path: %s", count, "" if count == 1 else "s", build_kind)
        try:
            refusal = exposure_error(config.auth, host, service.tenants.is_auth_required)
            if refusal is not None:
                raise ConfigError(refusal)
            service.start()
            address = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
            log.info(
                "listening on %s (OpenAI base URL %s/v1); ledger %s", address, address, shown_ledger_url(config.ledger)
            )
            lifecycle.tune_gc()
            stop = lifecycle.StopSignals()
            with stop.installed():
                await lifecycle.serve(
                    service.app,
                    service.gateway,
                    sock,
                    stop,
                    idle_timeout_s=config.server.idle_timeout_s,
                    drain_timeout_s=config.server.drain_timeout_s,
                )
        finally:
            await service.close()
        log.info("stopped")

    try:
        with wiring.exclusive_use(config), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        sock.close()


def _load(path: Path | None) -> Config:
    try:
        return load(path)
    except ConfigError as error:
        fail(str(error))


def _configure_logging(level: str) -> None:
    known = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if level not in known:
        fail(f"--log-level must be one of {', '.join(known)}")
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(
            console=Console(stderr=True, soft_wrap=True), show_path=False, highlighter=NullHighlighter()
        )
        logging.basicConfig(level=known[level], handlers=[handler], format="%(message)s")
    else:
        logging.basicConfig(level=known[level], format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def main() -> None:
    app()
