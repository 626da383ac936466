"""A process without free file descriptors says so, and serves again once some are free."""

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferry.ingress.http.descriptors import REPEAT_S, DescriptorMonitor
from support.serving import get
from support.waiting import until

LIMIT = 64
LIMIT_S = 120.0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_the_line_is_logged_at_most_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    def lines() -> int:
        """Without those of a gateway that another test left in a thread: the failure is everywhere in the process."""
        return sum(one.thread == threading.get_ident() for one in caplog.records)

    monitor = DescriptorMonitor()
    monitor.check(0.0)
    assert lines() == 0
    monkeypatch.setattr("inferry.ingress.http.descriptors.os.open", fail)
    for second in range(100):
        monitor.check(float(second))
    assert lines() == 2
    monkeypatch.undo()
    for second in range(100, 1000):
        monitor.check(float(second))
    assert lines() == 2
    assert REPEAT_S == 60.0


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """`inferry serve` with few descriptors: its address and its log."""
    worker = {"kind": "vllm", "name": "a", "url": "http://127.0.0.1:9", "models": ["m"]}
    (tmp_path / "inferry.yaml").write_text(json.dumps({"workers": [worker]}))
    log = tmp_path / "log"
    command = [sys.executable, "-m", "inferry", "serve", "--config", "inferry.yaml", "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    try:
        pattern = re.compile(r"listening on (http://127\.0\.0\.1:\d+) ")
        until(lambda: pattern.search(log.read_text()) is not None)
        found = pattern.search(log.read_text())
        assert found is not None
        url = found[1]
        until(lambda: is_served(url))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        yield url, log
    finally:
        process.kill()
        process.wait()


def is_served(url: str) -> bool:
    try:
        return get(url, "/health")[0] == 200
    except OSError:
        return False


def test_a_gateway_without_free_descriptors_logs_it_and_recovers(gateway: tuple[str, Path]) -> None:
    url, log = gateway
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    clients = [socket.create_connection(address, timeout=LIMIT_S) for _ in range(2 * LIMIT)]
    try:
        line = f"no file descriptor is free (Too many open files; the limit of this process is {LIMIT})"
        until(lambda: line in log.read_text())
    finally:
        for client in clients:
            client.close()
    until(lambda: is_served(url))
    assert all(is_served(url) for _ in range(LIMIT))
