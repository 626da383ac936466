"""A PostgreSQL server for tests, started by `scripts/postgres.sh`."""

import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

SCRIPT = Path(__file__).parents[2] / "scripts" / "postgres.sh"
# A server that is stopped at once keeps what was committed: only a crash of the machine would lose it.
FAST = ("-c fsync=off", "-c full_page_writes=off", "-c shared_buffers=16MB")
_numbers = itertools.count(1)


class PostgresServer:
    """`with PostgresServer() as server:` `server.database()` creates an empty database and returns its URL."""

    def __init__(self, *options: str) -> None:
        self._options = options or FAST

    def __enter__(self) -> Self:
        # Not in pytest's directory: the path of a Unix socket has at most 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="inferry-pg-", dir="/tmp"))
        self._directory.chmod(0o755)
        try:
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop("immediate", check=False)
        self._remove()

    def start(self) -> None:
        found = subprocess.run(
            [SCRIPT, "start", self._directory, *self._options], stdout=subprocess.PIPE, text=True, timeout=600
        )
        assert found.returncode == 0, "PostgreSQL could not be started; see the messages above"
        self.url = found.stdout.strip()

    def stop(self, mode: str = "fast", *, check: bool = True) -> None:
        subprocess.run([SCRIPT, "stop", self._directory, mode], check=check, timeout=600, stderr=subprocess.DEVNULL)

    def database(self) -> str:
        name = f"test_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url.replace("/postgres?", f"/{name}?")

    def execute(self, statement: str, url: str | None = None) -> list[tuple[object, ...]]:
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return [] if cursor.description is None else cursor.fetchall()

    def drop(self, url: str) -> None:
        self.execute(f"DROP DATABASE {url.partition('?')[0].rpartition('/')[2]} WITH (FORCE)")

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        Path(f"{self._directory}.log").unlink(missing_ok=True)
