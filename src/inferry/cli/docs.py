"""The generated reference pages: `python -m inferry.cli.docs` writes them, `--check` lists stale ones.

Each page is a pure function of the code it describes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main

from inferry.cli import main as cli
from inferry.cli.checkout import ROOT
from inferry.cli.config_page import config_page, shown
from inferry.cli.markdown import codes, page, table
from inferry.cli.metrics_page import metrics_page
from inferry.domain import errors
from inferry.domain.errors import GatewayError
from inferry.ingress.errors import error_body
from inferry.ingress.openapi import document

REFERENCE = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """The generated pages by file name."""
    return {
        "config.md": config_page(),
        "metrics.md": metrics_page(),
        "errors.md": errors_page(),
        "cli.md": cli_page(),
        "openapi.json": document.render_page(),
    }


def stale(directory: Path) -> list[str]:
    """Names of pages that differ from the code."""
    return [name for name, text in pages().items() if _read(directory / name) != text]


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text, encoding="utf-8")


def errors_page() -> str:
    rows = [
        (str(kind.status), f"`{kind.code}`", f"`{_wire_type(kind)}`", _yes(kind.retryable), _summary(kind))
        for kind in sorted(_error_kinds(), key=lambda kind: (kind.status, kind.code, kind.__name__))
    ]
    return page(
        "Errors",
        "src/inferry/domain/errors.py",
        "All errors have this body; `param` is the field or header concerned, or null:",
        '```json\n{"error": {"message": "…", "type": "rate_limit_error", "param": null, "code": "queue_full"}}\n```',
        "Retryable: clients should repeat the same call. Retryable errors with status 429 and 503 have `Retry-After` "
        "in seconds, and so has `deadline_infeasible`: after that time a call could meet the same deadline. "
        "After the first byte of a stream the same object is sent in-band, see [HTTP](http.md#streams). Messages never "
        "contain prompts or outputs.",
        table(("status", "code", "type", "retryable", "meaning"), rows),
    )


def _error_kinds() -> list[type[GatewayError]]:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, GatewayError)]
    # A subclass without its own code is the same error to clients.
    cases = {kind for kind in kinds for base in kind.__bases__ if base is not GatewayError and base in kinds}
    return [kind for kind in kinds if kind is not GatewayError and kind not in cases]


def _wire_type(kind: type[GatewayError]) -> str:
    named: str = json.loads(error_body(kind("")))["error"]["type"]
    return named


def _summary(kind: type[GatewayError]) -> str:
    return " ".join((kind.__doc__ or "").split())


# -- command line ----------------------------------------------------------------------------------------------------


def cli_page() -> str:
    sections = [part for path, command in commands() for part in _command_section(path, command)]
    return page(
        "Command line",
        "src/inferry/cli/",
        "Exit status: 0 for success, 2 for an invalid command line, configuration or ledger. "
        "All commands accept `--help`.",
        *sections,
    )


def commands() -> list[tuple[str, Any]]:
    """All commands by full name, groups before their members."""
    # Attributes instead of classes: recent releases of typer bundle click, so there is no single class to import.
    return list(_walk("inferry", typer.main.get_command(cli.app)))


def options(command: Any) -> list[tuple[list[str], Any]]:
    """The options of a command with all spellings."""
    return [
        ([*one.opts, *one.secondary_opts], one)
        for one in command.params
        if one.param_type_name == "option" and not getattr(one, "hidden", False)
    ]


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(f"{path} {name}", inner)


def _command_section(path: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    yield f"## `{path}`"
    yield " ".join((command.help or "").split())
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    named = "".join(f" {_argument(one)}" for one in arguments)
    yield f"```\n{path} [OPTIONS]{named}{' COMMAND [ARGS]...' if inner else ''}\n```"
    if inner:
        yield f"Commands: {codes(f'{path} {name}' for name in inner)}."
    rows = [(f"`{_argument(one)}`", _default(one), one.help or "") for one in arguments]
    rows += [(_spelling(names, one), _default(one), one.help or "") for names, one in options(command)]
    if rows:
        yield table(("option", "default", "meaning"), rows)


def _argument(argument: Any) -> str:
    name = f"{argument.metavar or argument.name.upper()}{'...' if argument.nargs != 1 else ''}"
    return name if argument.required else f"[{name}]"


def _spelling(names: list[str], option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in names)


def _default(option: Any) -> str:
    is_value = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    return shown(option.default) if is_value else ""


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m inferry.cli.docs", description="Write the generated reference pages."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    parser.add_argument("--directory", type=Path, default=REFERENCE, help="directory of the pages")
    arguments_given = parser.parse_args(arguments)
    if not arguments_given.check:
        write(arguments_given.directory)
        return 0
    old = stale(arguments_given.directory)
    if old:
        sys.stdout.write(f"stale, run `make docs`: {', '.join(old)}\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
