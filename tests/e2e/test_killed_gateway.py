"""`kill -9` of a real gateway with a real engine: after restarts, no more was delivered than the ceiling allows."""

import http.client
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from support.serving import free_port, get
from support.waiting import until

CEILING = 9_000
PROMPT = [7] * 12


class Gateway:
    """`inferry serve` in a directory that outlives it."""

    def __init__(self, directory: Path, model: Path) -> None:
        worker = {"kind": "embedded", "name": "local", "model": str(model), "models": ["tiny"]}
        config = {"workers": [worker], "tenants": {"acme": {"day_token_ceiling": CEILING}}}
        path = directory / "inferry.yaml"
        path.write_text(json.dumps(config))
        self.port = free_port()
        self.log = directory / "log"
        with self.log.open("a") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "inferry", "serve", "--config", str(path), "--port", str(self.port)],
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.until(self.is_ready)

    def is_ready(self) -> bool:
        try:
            return get(f"http://127.0.0.1:{self.port}", "/ready")[0] == 200
        except OSError:
            return False

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, problem=self.log.read_text)

    def stop(self, number: int) -> None:
        self.popen.send_signal(number)
        self.popen.wait(timeout=60)


class Clients:
    """Count what they get: a piece of a stream is a token at least."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.delivered = 0
        self.refusals: list[str] = []

    def _add(self, tokens: int) -> None:
        with self._lock:
            self.delivered += tokens

    def call(self, port: int, tokens: int) -> None:
        """One stream, to its end or to that of the gateway."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        headers = {"content-type": "application/json", "x-inferry-tenant": "acme"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                with self._lock:
                    self.refusals.append(json.loads(answer.read())["error"]["code"])
                return
            is_first = True
            for line in answer:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices")
                    if choices and choices[0].get("text"):
                        self._add(1 + len(PROMPT) * is_first)
                        is_first = False
        except (OSError, http.client.HTTPException):
            pass  # it was killed
        finally:
            connection.close()

    def calls(self, port: int, count: int, tokens: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.call, args=(port, tokens)) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads


def marks_of(directory: Path) -> int:
    with closing(sqlite3.connect(directory / "inferry.db")) as database:
        return int(database.execute("SELECT count(*) FROM watermarks").fetchone()[0])


def test_a_repeatedly_killed_gateway_never_exceeds_a_ceiling(tmp_path: Path, tiny_model: Path) -> None:
    clients = Clients()
    for _ in range(2):
        gateway = Gateway(tmp_path, tiny_model)
        before = clients.delivered
        threads = clients.calls(gateway.port, 8, 1_500)
        gateway.until(lambda before=before: clients.delivered >= before + 800)  # type: ignore[misc]
        gateway.stop(signal.SIGKILL)
        for thread in threads:
            thread.join()
    killed_at = clients.delivered
    assert marks_of(tmp_path) == 1
    gateway = Gateway(tmp_path, tiny_model)
    try:
        assert "not stopped cleanly" in gateway.log.read_text()
        for _ in range(200):
            if clients.refusals:
                break
            for thread in clients.calls(gateway.port, 4, 500):
                thread.join()
        assert set(clients.refusals) == {"tenant_budget_exhausted"}
    finally:
        gateway.stop(signal.SIGTERM)
    assert killed_at <= clients.delivered <= CEILING


def test_a_clean_stop_leaves_no_watermark_and_loses_no_row(tmp_path: Path, tiny_model: Path) -> None:
    clients = Clients()
    gateway = Gateway(tmp_path, tiny_model)
    for thread in clients.calls(gateway.port, 4, 100):
        thread.join()
    gateway.stop(signal.SIGTERM)
    assert not clients.refusals
    assert marks_of(tmp_path) == 0
    gateway = Gateway(tmp_path, tiny_model)
    gateway.stop(signal.SIGTERM)
    assert "not stopped cleanly" not in gateway.log.read_text()
