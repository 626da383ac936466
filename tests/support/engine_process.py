"""A real engine behind HTTP, as a process that can be asked, watched and killed."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from support.serving import free_port

ROOT = Path(__file__).parents[2]
START_S = 300.0


class EngineProcess:
    """A server of one model under the name `m`. A context manager; `start` again after a kill.

    `probe` is the prompt of the call that shows that it generates.
    """

    probe: Sequence[int] | str = "ping"

    def __init__(self, log_path: Path, environment: Mapping[str, str], directory: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._environment = environment
        self._directory = directory
        self._command: list[str] = []
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def start(self) -> None:
        self.begin()
        self.wait()

    def begin(self) -> None:
        self.stop()
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env={**_without_pythons(os.environ), **self._environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it has generated a token: a server says that it is healthy before it knows."""
        end = time.monotonic() + START_S
        while not self.generates():
            assert self._popen is not None
            assert self._popen.poll() is None, self._log_tail()
            assert time.monotonic() < end, self._log_tail()
            time.sleep(0.2)

    def stop(self) -> None:
        """Everything it started too."""
        if self._popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
            self._popen = None

    def send_signal(self, number: signal.Signals) -> None:
        """To the API server alone."""
        os.kill(self.pid, number)

    def generates(self) -> bool:
        if self._popen is None or self._popen.poll() is not None:
            return False
        try:
            return self._one_token() == 200
        except (OSError, http.client.HTTPException):
            return False

    def _one_token(self) -> int:
        # A server that was told to end may take the call and never answer.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            body = json.dumps({"model": "m", "prompt": self.probe, "max_tokens": 1})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            return connection.getresponse().status
        finally:
            connection.close()

    def _log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]


def _without_pythons(environment: "os._Environ[str]") -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("PYTHON")}
