"""`inferry ray`: place engines on a Ray cluster with Ray Serve, show and delete them."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from inferry.cli.config.loader import load
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.workers import RayWorkerConfig
from inferry.cli.ray_wiring import delete, deploy, ray_workers, status
from inferry.cli.terminal import fail

ray_app = typer.Typer(help="Engines on a Ray cluster: deploy, show and delete them.", no_args_is_help=True)

ConfigFile = Annotated[Path, typer.Argument(help="Configuration with workers of `kind: ray`.", metavar="CONFIG")]
Name = Annotated[str | None, typer.Option("--worker", help="Only the worker of this name.", metavar="NAME")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of lines of text.")]


@ray_app.command("deploy")
def deploy_(config_file: ConfigFile, worker: Name = None) -> None:
    """Place the engines of a configuration as applications on Ray Serve; a running application is replaced."""
    for config in _selected(config_file, worker):
        _ask(deploy, config)
        typer.echo(f"{config.name}: application {config.app_name} runs")


@ray_app.command("status")
def status_(config_file: ConfigFile, worker: Name = None, as_json: Json = False) -> None:
    """Show the applications and their replicas; exits with status 3 where one is not deployed."""
    found = {config.name: _ask(status, config) for config in _selected(config_file, worker)}
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        for name, one in found.items():
            typer.echo(f"{name}: not deployed" if one is None else f"{name}: {_line(one)}")
    if None in found.values():
        raise typer.Exit(3)


@ray_app.command("delete")
def delete_(config_file: ConfigFile, worker: Name = None) -> None:
    """Delete the applications. Calls in flight complete within `drain_timeout_s`."""
    for config in _selected(config_file, worker):
        was_deployed = _ask(delete, config)
        typer.echo(f"{config.name}: {'deleted' if was_deployed else 'not deployed'}")


def _selected(path: Path, name: str | None) -> list[RayWorkerConfig]:
    try:
        workers = [worker for worker in ray_workers(load(path)) if name in (None, worker.name)]
    except ConfigError as error:
        fail(str(error))
    if not workers:
        fail(f"{path} has no worker of kind ray" + ("" if name is None else f" named {name}"))
    return workers


def _ask(work: Callable[[RayWorkerConfig], Any], config: RayWorkerConfig) -> Any:
    """Ask Ray. Its errors end the command with their first line."""
    try:
        return work(config)
    except ConfigError as error:
        fail(str(error))
    except Exception as error:
        fail(str(error).strip().partition("\n")[0] or type(error).__name__, status=1)


def _line(found: Any) -> str:
    replicas = ", ".join(f"{count} {state.lower()}" for state, count in found.replicas.items())
    message = f" ({found.message})" if found.message else ""
    return f"{found.status.lower()}, replicas: {replicas or 'none'}{message}"
