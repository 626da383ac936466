"""Commands whose options are fields of Structs."""

from typing import Annotated

import typer
from msgspec import Struct
from typer.testing import CliRunner

from inferry.cli.option_groups import grouped


class Server(Struct, frozen=True, kw_only=True):
    url: Annotated[str, typer.Option(help="URL of the server.")]
    retries: Annotated[int, typer.Option("--tries", min=0, help="Retries.")] = 2
    quiet: Annotated[bool, typer.Option("--quiet")] = False


class Output(Struct, frozen=True, kw_only=True):
    names: Annotated[list[str] | None, typer.Option("--name")] = None


def run(*words: str) -> tuple[int, str]:
    app = typer.Typer()

    @app.command()
    @grouped
    def command(files: list[str], *, server: Server, output: Output) -> None:
        """What it does."""
        typer.echo(f"{files} {server} {output}")

    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "120"})
    return done.exit_code, done.output


def test_a_group_is_made_of_its_options_and_defaults() -> None:
    assert run("a", "b", "--url", "u", "--quiet", "--name", "x", "--name", "y") == (
        0,
        "['a', 'b'] Server(url='u', retries=2, quiet=True) Output(names=['x', 'y'])\n",
    )


def test_the_rules_of_an_option_hold() -> None:
    assert "Invalid value for '--tries'" in run("a", "--url", "u", "--tries", "-1")[1]
    assert "Missing option '--url'" in run("a")[1]


def test_help_has_the_texts_of_command_and_options() -> None:
    status, text = run("--help")
    assert status == 0
    for part in ("What it does.", "URL of the server.", "--tries", "[default: 2]"):
        assert part in text
