"""`inferry serve` as a process: it starts, drains on SIGTERM, and leaves nothing broken when it is killed."""

import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI, Stream
from openai.types import Completion

from support.serving import get, post

PROMPT = [7] * 12
PATIENT = {"no_worker_timeout_s": 600}
"""However slowly an engine starts again, a lost job waits for it."""
LISTENING = re.compile(r"listening\s+on\s+(http://127\.0\.0\.1:(\d+))\s")


class Process:
    """The command, with the embedded engine, in a directory of its own."""

    def __init__(self, directory: Path, model: Path, *, grace_s: float = 30) -> None:
        config = directory / "inferry.yaml"
        worker = {"kind": "embedded", "name": "local", "model": str(model), "models": ["tiny"]}
        config.write_text(json.dumps({"server": {"drain_timeout_s": grace_s}, "workers": [worker], "health": PATIENT}))
        self.directory = directory
        self.log_path = directory / "log"
        with self.log_path.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "inferry", "serve", "--config", str(config), "--port", "0"],
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.url, self.port = "", 0

    def until_ready(self) -> None:
        self.until(lambda: LISTENING.search(self.log_path.read_text()) is not None)
        listening = LISTENING.search(self.log_path.read_text())
        assert listening is not None
        self.url, self.port = listening[1], int(listening[2])
        self.until(lambda: self.status("/ready") == 200)

    def status(self, path: str) -> int | None:
        try:
            return get(self.url, path)[0]
        except OSError:
            return None

    def until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.popen.poll() is None or condition(), self.log_path.read_text()
            assert time.monotonic() < end, self.log_path.read_text()
            time.sleep(0.02)

    def stream(self, tokens: int) -> Stream[Completion]:
        api = OpenAI(base_url=self.url + "/v1", api_key="unused", max_retries=0)
        return api.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )

    def children(self) -> list[int]:
        found = subprocess.run(["pgrep", "-P", str(self.popen.pid)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Process]]:
    """Starts one, which does not outlive the test."""
    started: list[Process] = []

    def start(**more: float) -> Process:
        process = Process(tmp_path, tiny_model, **more)
        started.append(process)
        process.until_ready()
        return process

    yield start
    for process in started:
        process.popen.kill()
        process.popen.wait()


@pytest.fixture
def process(start: Callable[..., Process]) -> Process:
    return start()


def test_sigterm_drains_running_streams_and_refuses_new_work(start: Callable[..., Process]) -> None:
    process = start(grace_s=600)
    stream = process.stream(2_000)
    next(iter(stream))
    process.popen.send_signal(signal.SIGTERM)
    process.until(lambda: process.status("/ready") == 503)
    status, headers, answer = post(process.url, "/v1/completions", {"model": "tiny", "prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (503, "draining")
    assert int(headers["retry-after"]) >= 1
    assert process.status("/health") == 200
    pieces = list(stream)
    assert pieces[-1].choices[0].finish_reason == "length"
    assert process.popen.wait(timeout=120) == 0
    stream.close()


def test_after_the_drain_timeout_streams_get_an_error_and_the_process_exits(start: Callable[..., Process]) -> None:
    process = start(grace_s=0.2)
    stream = process.stream(16_000)
    next(iter(stream))
    process.popen.send_signal(signal.SIGTERM)
    with pytest.raises(Exception, match="shut down"):
        list(stream)
    assert process.popen.wait(timeout=120) == 0
    stream.close()


def test_a_kill_leaves_the_ledger_intact_and_no_engine_behind(process: Process) -> None:
    for _ in range(5):
        assert post(process.url, "/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 3})[0] == 200
    stream = process.stream(16_000)
    next(iter(stream))
    database = process.directory / "inferry.db"

    def rows() -> int:
        with sqlite3.connect(database) as connection:
            count: int = connection.execute("select count(*) from attempts").fetchone()[0]
        connection.close()
        return count

    process.until(lambda: rows() == 5)
    children = process.children()
    assert children
    process.popen.kill()
    process.popen.wait()
    stream.close()
    assert rows() == 5
    connection = sqlite3.connect(database)
    assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
    connection.close()
    end = time.monotonic() + 120
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < end, "the engine outlived the gateway"
        time.sleep(0.02)


def test_a_stream_resumes_when_its_only_engine_is_killed_and_restarts(process: Process) -> None:
    undisturbed = list(process.stream(800))
    (engine,) = process.children()
    stream = process.stream(800)
    events = [next(iter(stream))]
    os.kill(engine, signal.SIGKILL)
    events += list(stream)
    assert engine not in process.children()
    again = re.findall(r"^inferry_attempt_retries_total\{.*\} (\S+)$", get(process.url, "/metrics")[2], re.MULTILINE)
    assert sum(map(float, again)) >= 1
    assert len({event.id for event in events}) == 1
    assert "".join(event.choices[0].text for event in events) == "".join(event.choices[0].text for event in undisturbed)
    assert events[-1].choices[0].finish_reason == "length"


def test_a_taken_port_is_a_clear_error(process: Process) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "inferry", "serve", "--port", str(process.port)],
        cwd=process.directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert second.returncode == 2
    assert "cannot serve" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_frozen_engine_does_not_keep_clients_from_getting_an_error(start: Callable[..., Process]) -> None:
    process = start(grace_s=0.2)
    stream = process.stream(16_000)
    next(iter(stream))
    (engine,) = process.children()
    os.kill(engine, signal.SIGSTOP)
    try:
        process.popen.send_signal(signal.SIGTERM)
        with pytest.raises(Exception, match="shut down"):
            list(stream)
        assert process.popen.wait(timeout=120) == 0
    finally:
        process.popen.kill()
        process.popen.wait()
        if os.path.exists(f"/proc/{engine}"):
            os.kill(engine, signal.SIGKILL)
        stream.close()
    log = process.log_path.read_text()
    assert "Traceback" not in log


HOLDER = """
import resource, socket, sys
count, port = int(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for _ in range(count):
    sock = socket.socket()
    sock.connect(("127.0.0.1", port))
    held.append(sock)
print("holding", flush=True)
sys.stdin.read()
"""


def test_ten_thousand_idle_connections_delay_no_other_client(process: Process) -> None:
    # Both ends need a file each; a machine that allows fewer gets as many as it allows.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = min(10_000, hard - 500)
    assert count >= 1_000, f"this machine allows only {hard} open files"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(count), str(process.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"holding\n"
        call = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
        for _ in range(20):
            assert post(process.url, "/v1/completions", call)[0] == 200
        assert holder.poll() is None
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()
    assert post(process.url, "/v1/completions", call)[0] == 200
