"""The command line: parse options, call wiring, print."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from inferry._version import __version__
from inferry.cli.adapters import adapters_app
from inferry.cli.alerts import alerts_app
from inferry.cli.bench import bench
from inferry.cli.calibrate import calibrate
from inferry.cli.callback_secrets import callback_secrets_app
from inferry.cli.cascades import cascade_app
from inferry.cli.config.alerts import check_webhook_secret
from inferry.cli.config.checks import advise_on_lanes, advise_on_precisions
from inferry.cli.config.cluster import advise_on_cluster
from inferry.cli.config.loader import dump, duplicate_names, load, load_workers
from inferry.cli.config.python_functions import check_functions
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.secrets import check_secret_variables
from inferry.cli.config.tenants import AuthConfig, advise_on_tenants, check_pools
from inferry.cli.config_commands import config_app
from inferry.cli.dead_letters import dead_letters
from inferry.cli.doctor import doctor
from inferry.cli.keys import keys_app, tenants_app
from inferry.cli.ledger import ReportBasis, ledger_app
from inferry.cli.models import models_app
from inferry.cli.observe import observe_app
from inferry.cli.plan import plan_app
from inferry.cli.profile import profile
from inferry.cli.pull_worker import worker
from inferry.cli.ray import ray_app
from inferry.cli.run_batch import run_batch
from inferry.cli.serve import run_server
from inferry.cli.simulate import simulate
from inferry.cli.terminal import configure_logging, fail
from inferry.cli.top import top
from inferry.cli.workers import workers_app
from inferry.domain.reports import run_budgets

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


def _report_basis(path: Path | None) -> ReportBasis:
    """The run budgets and prices in a configuration."""
    config = _load(path)
    return run_budgets(config.configured_tenants().values()), config.price_list()


app.add_typer(ledger_app(_ledger_url, _report_basis), name="ledger")
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.add_typer(callback_secrets_app, name="callback-secrets")
app.add_typer(alerts_app, name="alerts")
app.add_typer(models_app, name="models")
app.add_typer(plan_app, name="plan")
app.add_typer(observe_app, name="observe")
app.add_typer(workers_app, name="workers")
app.add_typer(config_app, name="config")
app.add_typer(adapters_app, name="adapters")
app.add_typer(ray_app, name="ray")
app.add_typer(cascade_app, name="cascade")
app.command()(simulate)
app.command()(calibrate)
app.command()(bench)
app.command()(profile)
app.command()(doctor)
app.command()(top)
app.command("run-batch")(run_batch)
app.command()(worker)
app.command("dead-letters")(dead_letters)

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
    workers: Annotated[
        int,
        typer.Option(min=1, max=64, help="Gateway processes on the port: one owns the engines, all serve HTTP."),
    ] = 1,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C, then drain."""
    configure_logging(log_level)
    config = _load(config_file)
    if no_auth:
        config = msgspec.structs.replace(config, auth=AuthConfig(mode="off", allow_remote=True))
    host, port = config.server.host if host is None else host, config.server.port if port is None else port
    try:
        status = run_server(config, host, port, workers, config_file)
    except ConfigError as error:
        fail(str(error))
    raise typer.Exit(status)


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
    for message in advise_on_lanes(config.lane_policies()):
        typer.echo(f"# {message}")
    for message in advise_on_tenants(config.tenants, config.prices, config.workers):
        typer.echo(f"# {message}")
    for message in (*advise_on_precisions(config.workers), *advise_on_cluster(config.cluster, config.tenants)):
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
    missing = [*missing, *check_webhook_secret(config.alerts), *check_functions(config.workers)]
    if missing:
        fail("; ".join(missing))


def _load(path: Path | None) -> Config:
    try:
        return load(path)
    except ConfigError as error:
        fail(str(error))


def main() -> None:
    app()
