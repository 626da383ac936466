"""`inferry workers`: list, drain and readmit the workers of a running gateway."""

import time
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferry.cli.gateway_client import DEFAULT_URL, Url, ask
from inferry.cli.terminal import fail

workers_app = typer.Typer(help="Workers of a running gateway: list, drain, readmit.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Name = Annotated[str, typer.Argument(help="Name of the worker.")]

WIDE_COLUMNS = 160
_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "down": "red"}


@workers_app.command("list")
def list_workers(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """List workers with phase, circuit breaker, capacity and load."""
    _show(_call(url, "GET", "/admin/workers"), as_json)


@workers_app.command()
def drain(name: Name, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Stop sending new work to a worker; running calls complete."""
    _show(_call(url, "POST", f"/admin/workers/{quote(name, safe='')}/drain"), as_json)


@workers_app.command()
def readmit(name: Name, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Send new work to a drained worker again."""
    _show(_call(url, "POST", f"/admin/workers/{quote(name, safe='')}/readmit"), as_json)


def _call(url: str, method: str, path: str) -> Any:
    """Call the gateway. The key comes from the environment, so that process lists do not show it."""
    answer = ask(url, method, path)
    if "workers" not in answer:
        fail(f"{url} is not an Inferry gateway", status=1)
    return answer["workers"]


def _show(workers: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(workers).decode())
        return
    table = Table("worker", "kind", "group", "phase", "since", "breaker", "capacity", "running", "waiting", "models")
    now = time.time()
    for worker in workers:
        phase, load = worker["phase"], worker["load"]
        breaker = worker["breaker"] + (f" ({worker['opens']} opened)" if worker["opens"] else "")
        sequences = worker["capacity"]["sequences"]
        capacity = "any" if sequences is None else str(sequences)
        if worker["share"] < 1:
            capacity += f" ({worker['share']:.0%})"
        table.add_row(
            worker["name"],
            worker["kind"],
            worker["group"],
            Text(phase, style=_COLOURS.get(phase, "")),
            _format_duration(now - worker["since"]),
            breaker,
            capacity,
            str(load["running"]),
            str(load["waiting"]),
            ", ".join(worker["models"]),
        )
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE_COLUMNS)  # piped output must not fold names
    console.print(table)


def _format_duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
