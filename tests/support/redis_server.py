"""A private Redis server for tests, on a Unix socket. `make test` installs it (scripts/install_redis.sh)."""

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import redis

from support.waiting import until

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".venv" / "redis" / "redis-server"


class RedisServer:
    """`with RedisServer() as server:` `server.url` names it. `persists`: a restart keeps what was written."""

    def __init__(self, *, persists: bool = False) -> None:
        self._persists = persists

    def __enter__(self) -> Self:
        program = str(INSTALLED) if INSTALLED.exists() else shutil.which("redis-server")
        if program is None:
            pytest.fail("redis-server is missing: run `make test`, or scripts/install_redis.sh .venv/redis")
        self._program = program
        # Not in pytest's directory: the path of a Unix socket has at most 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="inferry-redis-", dir="/tmp"))
        self.url = f"unix://{self._directory}/redis.sock"
        try:
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._remove()

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", f"{self._directory}/redis.sock", "--dir", str(self._directory)]
        options += ["--save", "", "--appendonly", "yes" if self._persists else "no"]
        self._process = subprocess.Popen([self._program, *options], stdout=subprocess.DEVNULL)
        until(self._answers)

    def kill(self) -> None:
        """End it at once. Without persistence its state is lost."""
        self._process.kill()
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "redis-server ended"
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
