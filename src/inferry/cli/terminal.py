"""What the commands share: the console, error messages with an exit status, atomic writes of results."""

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler

USAGE_ERROR = 2


def console(width: int = 120) -> Console:
    """A console that does not fold tables in piped output."""
    one = Console(highlight=False)
    if not one.is_terminal and "COLUMNS" not in os.environ:
        one = Console(highlight=False, width=width)
    return one


def fail(message: str, status: int = USAGE_ERROR) -> NoReturn:
    """Print the error and exit with the status."""
    Console(stderr=True, soft_wrap=True).print(f"inferry: {message}", style="bold red", markup=False, highlight=False)
    raise typer.Exit(status)


def check_key(key: str | None, source: str) -> str | None:
    """The key. Exits where no HTTP header may have it; the message names its source only."""
    if key is not None and not (key.isprintable() and all(char <= "\xff" for char in key)):
        fail(f"{source} has characters that no header may have")
    return key


def write_file(path: Path, data: bytes) -> None:
    """Write atomically, through a temporary file. Exits on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path}: {error.strerror}")


def configure_logging(level: str) -> None:
    """Log to standard error. Exits for an unknown level."""
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
