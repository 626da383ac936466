"""A PostgreSQL server of its own for a benchmark, on this machine."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferry.cli.checkout import ROOT


class PostgresServer:
    """A server with its default settings, so that a commit is on the disk."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.start()

    def start(self) -> None:
        self.url = self._control("start", check=True).stdout.strip()

    def stop(self, *, check: bool = True) -> None:
        self._control("stop", "immediate", check=check)

    def _control(self, verb: str, *options: str, check: bool) -> "subprocess.CompletedProcess[str]":
        script = ROOT / "scripts" / "postgres.sh"
        return subprocess.run([script, verb, self._directory, *options], stdout=subprocess.PIPE, text=True, check=check)


@contextmanager
def run_postgres() -> Iterator[PostgresServer]:
    directory = tempfile.mkdtemp(prefix="inferry-pg-", dir="/tmp")
    Path(directory).chmod(0o755)
    server = PostgresServer(directory)
    try:
        yield server
    finally:
        server.stop(check=False)
        subprocess.run(["rm", "-rf", directory, f"{directory}.log"], check=False)
