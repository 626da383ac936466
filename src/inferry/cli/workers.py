"""`inferry workers`: what a running gateway believes of its workers, and taking them out and back in."""

import http.client
import os
import time
from typing import Annotated, Any, NoReturn
from urllib.parse import quote, urlsplit

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferry.cli.config.schema import ADMIN_KEY

workers_app = typer.Typer(help="The workers of a running gateway: list, drain, readmit.", no_args_is_help=True)

Url = Annotated[str, typer.Option("--url", help="Where the gateway is.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Name = Annotated[str, typer.Argument(help="The worker's name.")]

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
WIDE_COLUMNS = 160
_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "down": "red"}


@workers_app.command("list")
def list_workers(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show every worker: its phase, its circuit breaker, its capacity and its load."""
    _show(_call(url, "GET", "/admin/workers"), as_json)


@workers_app.command()
def drain(name: Name, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Give a worker no new work; what runs there goes on to its end."""
    _show(_call(url, "POST", f"/admin/workers/{quote(name, safe='')}/drain"), as_json)


@workers_app.command()
def readmit(name: Name, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Give a drained worker new work again."""
    _show(_call(url, "POST", f"/admin/workers/{quote(name, safe='')}/readmit"), as_json)


def _call(url: str, method: str, path: str) -> Any:
    """The gateway's answer; the key comes from the environment, so that no process list shows it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter("it must be of the form http://HOST:PORT", param_hint="--url")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    key = os.environ.get(ADMIN_KEY)
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers={"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        _fail(f"{url} cannot be reached: {error}")
    finally:
        connection.close()
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    if response.status != 200:
        problem = answer.get("error") if isinstance(answer, dict) else None
        _fail(problem["message"] if isinstance(problem, dict) else f"{url} answered {response.status}")
    if not isinstance(answer, dict) or "workers" not in answer:
        _fail(f"{url} does not answer like an Inferry gateway")
    return answer["workers"]


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"inferry: {message}", style="bold red", markup=False, highlight=False)
    raise typer.Exit(1)


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
        console.width = max(console.width, WIDE_COLUMNS)  # whoever reads it there wants the words whole
    console.print(table)


def _format_duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
