"""A gateway is replaced while clients call it: no call fails, and every stream is complete."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.children import environment
from support.serving import get, post
from support.several_processes import EngineThread, Processes, a_body, expected_text, processes
from support.steady_clients import SteadyClients
from support.waiting import until

CONFIG: dict[str, Any] = {"server": {"drain_timeout_s": 120}, "health": {"no_worker_timeout_s": 120}}
LONG = 200


def _starts(gateway: Processes) -> int:
    return len(re.findall("listening on", gateway.whole_log()))


@pytest.mark.parametrize("count", [1, 3])
def test_sighup_replaces_the_process_image_without_a_failed_call(tmp_path: Path, count: int) -> None:
    with processes(tmp_path, CONFIG, count) as (gateway, engine):
        engine.delay_s = 0.004
        with SteadyClients([gateway.port]) as clients:
            until(lambda: len(set(clients.processes)) == count)
            before = set(clients.processes)
            # The second kind cannot continue elsewhere: the old processes complete it.
            bodies = [a_body(number, LONG, stream=True) for number in range(4)]
            bodies += [a_body(number, LONG, stream=True, logprobs=1) for number in range(4, 8)]
            streams = [gateway.begin(body) for body in bodies]
            until(lambda: all(one.text for one in streams))
            os.kill(gateway.pid, signal.SIGHUP)
            gateway.until(lambda: _starts(gateway) == 2, 120)
            clients.wait_for()
            until(lambda: all(one.status for one in streams))
            os.kill(gateway.pid, signal.SIGHUP)
            gateway.until(lambda: _starts(gateway) == 3, 120)
            clients.wait_for()
        assert clients.failures == [], gateway.log()
        assert clients.reused > 0
        assert len(before) == count
        assert len(clients.processes) >= len(before) + 2  # the later images have ids of their own
        for body, one in zip(bodies, streams, strict=True):
            assert one.text == expected_text(body)
            assert one.body.endswith(b"data: [DONE]\n\n")
        os.kill(gateway.pid, signal.SIGTERM)
        assert gateway.wait() == 0


@pytest.mark.parametrize("count", [1, 2])
def test_sighup_while_the_process_image_is_replaced_does_not_end_the_gateway(tmp_path: Path, count: int) -> None:
    with processes(tmp_path, CONFIG, count) as (gateway, _):

        def is_replaced() -> bool:
            os.kill(gateway.pid, signal.SIGHUP)
            return _starts(gateway) > 1

        gateway.until(is_replaced, 120)
        assert gateway.call("POST", "/v1/completions", a_body(tokens=2)).status == 200
        os.kill(gateway.pid, signal.SIGTERM)
        assert gateway.wait() == 0


@pytest.mark.parametrize("count", [1, 2])
def test_sighup_with_a_broken_configuration_changes_nothing(tmp_path: Path, count: int) -> None:
    with processes(tmp_path, CONFIG, count) as (gateway, _):
        (tmp_path / "inferry.yaml").write_text("sevrer: {}\n")
        os.kill(gateway.pid, signal.SIGHUP)
        gateway.until(lambda: "no upgrade" in gateway.whole_log(), 120)
        assert "sevrer" in gateway.whole_log()
        assert gateway.call("POST", "/v1/completions", a_body(tokens=2)).status == 200
        assert _starts(gateway) == 1


def test_a_draining_gateway_serves_its_connections_to_their_end(tmp_path: Path) -> None:
    with processes(tmp_path, CONFIG, 1) as (gateway, engine):
        idle, busy = (http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=120) for _ in range(2))
        idle.request("GET", "/health")
        idle.getresponse().read()
        engine.hold(2)
        busy.request("POST", "/v1/completions", json.dumps(a_body(1, 6, stream=True)))
        stream = busy.getresponse()
        begun = stream.read1(1000)
        os.kill(gateway.pid, signal.SIGTERM)
        until(lambda: get(gateway.url, "/ready")[0] == 503)
        status, headers, answer = post(gateway.url, "/v1/completions", a_body())
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert int(headers["retry-after"]) >= 1
        assert idle.sock is not None
        assert idle.sock.recv(1) == b""  # closed after a moment in which a request might have been on its way
        engine.open()
        assert (begun + stream.read()).endswith(b"data: [DONE]\n\n")
        busy.request("POST", "/v1/completions", json.dumps(a_body(2, 3)))
        last = busy.getresponse()
        assert (last.status, last.getheader("connection")) == (200, "close")
        assert json.loads(last.read())["choices"][0]["text"] == expected_text(a_body(2, 3))
        assert gateway.wait() == 0
        idle.close()
        busy.close()


# -- systemd ---------------------------------------------------------------------------------------------------------


class Manager:
    """Does what systemd does: it holds the port, passes it to the service, and reads the states it reports."""

    def __init__(self, directory: Path, engine: EngineThread) -> None:
        self._directory = directory
        worker = {"name": "up", "kind": "vllm", "url": engine.upstream.url}
        (directory / "inferry.yaml").write_text(json.dumps({**CONFIG, "workers": [worker]}))
        self._port = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._port.getsockname()[1]
        self._states = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._states.bind(str(directory / "notify"))
        self._states.settimeout(120)
        self.popen: subprocess.Popen[bytes]

    def start(self) -> None:
        # The variables name the process that gets the sockets; they begin at descriptor 3.
        script = f'exec 3<&{self._port.fileno()}; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"'
        command = [sys.executable, "-m", "inferry", "serve", "--config", "inferry.yaml"]
        with (self._directory / "log").open("ab") as log:
            self.popen = subprocess.Popen(
                ["bash", "-c", script, "bash", *command],
                cwd=self._directory,
                stdout=log,
                stderr=log,
                pass_fds=[self._port.fileno()],
                env=environment(NOTIFY_SOCKET=str(self._directory / "notify")),
            )

    def state(self) -> str:
        return self._states.recv(1000).decode().partition("\n")[0]

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait(120)
        self._port.close()
        self._states.close()


@contextmanager
def managed(directory: Path) -> Iterator[tuple[Manager, EngineThread]]:
    with EngineThread() as engine:
        manager = Manager(directory, engine)
        try:
            manager.start()
            yield manager, engine
        finally:
            manager.close()


def test_systemd_restarts_and_reloads_the_service_without_a_failed_call(tmp_path: Path) -> None:
    with managed(tmp_path) as (manager, engine):
        engine.delay_s = 0.004
        assert manager.state() == "READY=1"
        with SteadyClients([manager.port]) as clients:
            clients.wait_for(3)
            manager.popen.send_signal(signal.SIGTERM)
            assert manager.state() == "STOPPING=1"
            assert manager.popen.wait(120) == 0
            manager.start()
            assert manager.state() == "READY=1"
            clients.wait_for()
            manager.popen.send_signal(signal.SIGHUP)
            assert manager.state() == "RELOADING=1"
            assert manager.state() == "READY=1"
            clients.wait_for()
        assert clients.failures == [], (tmp_path / "log").read_text()
        assert len(clients.processes) == 3
