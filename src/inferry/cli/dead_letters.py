"""`inferry dead-letters`: stored work of a running gateway that was given up."""

from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from inferry.cli.gateway_client import DEFAULT_URL, AdminKey, Url, ask
from inferry.cli.keys import format_time
from inferry.cli.terminal import console


def dead_letters(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List batch items and async jobs that were delivered too often without a result, and why."""
    found: list[dict[str, Any]] = ask(url, "GET", "/admin/dead-letters", admin_key)["dead_letters"]
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    if not found:
        typer.echo("no dead letters")
        return
    table = Table("given up", "work", "tenant", "model", "reason", box=None)
    for one in found:
        table.add_row(format_time(one["at"]), one["id"], one["tenant"], one["model"], one["reason"])
    console().print(table)
