"""`inferry serve` as a process: it starts, drains on SIGTERM, and leaves nothing broken when it is killed."""

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI, Stream
from openai.types import Completion

from support.serving import free_port, get, post

PROMPT = [7] * 12


class Process:
    """The command, with the embedded engine, in a directory of its own."""

    def __init__(self, directory: Path, model: Path, *, grace_s: float = 30) -> None:
        config = directory / "inferry.yaml"
        worker = {"kind": "embedded", "name": "local", "model": str(model), "models": ["tiny"]}
        config.write_text(json.dumps({"server": {"drain_grace_s": grace_s}, "workers": [worker]}))
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = directory / "log"
        with self.log_path.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "inferry", "serve", "--config", str(config), "--port", str(self.port)],
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
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
def process(tmp_path: Path, tiny_model: Path) -> Iterator[Process]:
    process = Process(tmp_path, tiny_model)
    yield process
    process.popen.kill()
    process.popen.wait()


def test_sigterm_drains_running_streams_and_refuses_new_work(process: Process) -> None:
    stream = process.stream(600)
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


def test_after_the_grace_streams_are_told_and_the_process_leaves(tmp_path: Path, tiny_model: Path) -> None:
    process = Process(tmp_path, tiny_model, grace_s=0.2)
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
    stream = process.stream(8000)
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


def test_a_stream_goes_on_when_its_only_engine_is_killed_and_comes_back(process: Process) -> None:
    undisturbed = list(process.stream(1_500))
    stream = process.stream(1_500)
    events = [next(iter(stream))]
    for pid in process.children():
        os.kill(pid, signal.SIGKILL)
    events += list(stream)
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


def test_a_frozen_engine_does_not_keep_clients_from_being_told(tmp_path: Path, tiny_model: Path) -> None:
    process = Process(tmp_path, tiny_model, grace_s=0.2)
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


def test_a_prompt_far_beyond_the_context_is_refused_at_once(process: Process) -> None:
    begin = time.monotonic()
    status, _, answer = post(process.url, "/v1/completions", {"model": "tiny", "prompt": "hello world " * 1_000_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert time.monotonic() - begin < 5


def test_a_long_prompt_is_tokenised_without_stopping_everybody(process: Process) -> None:
    worst = 0.0
    done = threading.Event()

    def ask() -> None:
        post(process.url, "/v1/completions", {"model": "tiny", "prompt": "hello world " * 100_000, "max_tokens": 1})
        done.set()

    asking = threading.Thread(target=ask)
    asking.start()
    while not done.is_set():
        begin = time.monotonic()
        assert get(process.url, "/health")[0] == 200
        worst = max(worst, time.monotonic() - begin)
    asking.join()
    assert worst < 0.5


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


def test_ten_thousand_idle_connections_hurt_nobody(process: Process) -> None:
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
            begin = time.monotonic()
            assert post(process.url, "/v1/completions", call)[0] == 200
            assert time.monotonic() - begin < 2
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()
    assert post(process.url, "/v1/completions", call)[0] == 200
