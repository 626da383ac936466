"""Real servers that freeze or die while idle are detected soon, and no call fails."""

import asyncio
import contextlib
import http.client
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.gateway_process import Answer, GatewayProcess, Request, StreamReaders
from support.serving import get, post
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Serve = Callable[..., GatewayProcess]
Pair = tuple[VllmServer, VllmServer]
CALLS = 48
FROZEN_S = 60.0
"""How long a server stays frozen: a call that waited for it shows."""
NOTICED_S = 5.0
SLACK_S = 2.0
"""Beyond what it takes when nothing is frozen."""
FIXED = {"capacity": "fixed"}


@contextlib.contextmanager
def frozen(server: VllmServer) -> Iterator[None]:
    """All processes of the server stand still meanwhile."""
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGCONT)


def latest(answers: list[Answer]) -> float:
    assert all(answer.output_tokens == 8 for answer in answers)
    return max(answer.first_s or 1e9 for answer in answers)


def calls(gateway: GatewayProcess, first: int) -> list[Answer]:
    async def scenario() -> list[Answer]:
        async with StreamReaders(gateway.url) as readers:
            return await readers.read_all([Request(first + number, tokens=8, lane="P0") for number in range(CALLS)])

    return asyncio.run(asyncio.wait_for(scenario(), 300))


def seconds_until(condition: Callable[[], bool], most_s: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + most_s
        time.sleep(0.05)
    return time.monotonic() - began


def up(gateway: GatewayProcess) -> list[float]:
    return list(gateway.metric_by_label("inferry_worker_up").values())


@pytest.mark.parametrize("idle_s", [0.3, 6.0], ids=["unnoticed", "noticed"])
def test_no_call_waits_for_a_server_that_froze_while_idle(serve: Serve, servers: Pair, idle_s: float) -> None:
    gateway = serve(FIXED)
    calls(gateway, 0)
    normal = max(latest(calls(gateway, 100)), latest(calls(gateway, 200)))
    with frozen(servers[0]):
        began = time.monotonic()
        time.sleep(idle_s)
        found = latest(calls(gateway, 300))
        assert time.monotonic() - began < FROZEN_S, "nobody may have waited for the thaw"
        retried, again = (gateway.metric(f"inferry_{name}_retries_total") for name in ("hedged", "attempt"))
        assert 0.0 in up(gateway)
    print(f"latest first token: {normal:.2f} s, with one server frozen {found:.2f} s; {retried=:g}, {again=:g}")
    assert found < normal + SLACK_S
    took = seconds_until(lambda: up(gateway) == [1.0, 1.0], 60)
    print(f"up again {took:.1f} s after the thaw")
    assert latest(calls(gateway, 400)) < normal + SLACK_S


def alone(directory: Path, server: VllmServer) -> GatewayProcess:
    workers = [{"kind": "vllm", "name": "only", "url": server.url}]
    return GatewayProcess(directory, {"workers": workers, "health": {"no_worker_timeout_s": 300}})


def is_ready(gateway: GatewayProcess) -> bool:
    return get(gateway.url, "/ready")[0] == 200


def test_a_server_that_freezes_while_idle_is_not_ready_within_five_seconds(servers: Pair, tmp_path: Path) -> None:
    with alone(tmp_path, servers[0]) as gateway:
        time.sleep(1)
        with frozen(servers[0]):
            took = seconds_until(lambda: not is_ready(gateway) and up(gateway) == [0.0], 30)
        back = seconds_until(lambda: is_ready(gateway) and up(gateway) == [1.0], 60)
    print(f"frozen: not ready after {took:.1f} s; ready {back:.1f} s after the thaw")
    assert took < NOTICED_S


def patient_post(gateway: GatewayProcess, body: Any) -> tuple[int, Any]:
    """As long as a server may take to start."""
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=300)
    try:
        connection.request("POST", "/v1/completions", msgspec.json.encode(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, msgspec.json.decode(response.read())
    finally:
        connection.close()


def test_a_server_that_dies_while_idle_is_not_ready_and_the_next_call_waits_for_it(
    servers: Pair, tmp_path: Path
) -> None:
    server = servers[0]
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    with alone(tmp_path, server) as gateway, ThreadPoolExecutor(2) as clients:
        time.sleep(1)
        server.stop()
        at_once = clients.submit(patient_post, gateway, body)
        took = seconds_until(lambda: not is_ready(gateway) and up(gateway) == [0.0], 30)
        after = clients.submit(patient_post, gateway, body)
        server.begin()
        for call in (at_once, after):
            status, said = call.result(timeout=300)
            assert (status, said.get("usage", {}).get("completion_tokens")) == (200, 4), said
    print(f"dead: not ready after {took:.1f} s; both calls answered")
    assert took < NOTICED_S


def long_call(gateway: GatewayProcess, number: int) -> int:
    body = {"model": "m", "prompt": [number + 5] * 8, "max_tokens": 350, "ignore_eos": True, "temperature": 1.0}
    return post(gateway.url, "/v1/completions", body, {"x-inferry-run-id": "doomed"})[0]


def delete(gateway: GatewayProcess, path: str) -> Any:
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("DELETE", path)
        return msgspec.json.decode(connection.getresponse().read())
    finally:
        connection.close()


def running(server: VllmServer) -> float:
    return server.metric("vllm:num_requests_running")


@pytest.mark.parametrize("wait_s", [0.0, 6.0], ids=["unnoticed", "noticed"])
def test_a_cancelled_run_reports_what_a_frozen_server_has_not_confirmed(
    serve: Serve, servers: Pair, wait_s: float
) -> None:
    gateway = serve({**FIXED, "max_sequences": 10})
    froze, lives = servers
    with ThreadPoolExecutor(40) as clients, contextlib.ExitStack() as stack:
        with lives.held() as held_alive, froze.held() as held:
            calls = [clients.submit(long_call, gateway, number) for number in range(40)]
            # Both engines take in what they were sent, and end nothing of it.
            for _ in range(200):
                held.run_for(0.05)
                held_alive.run_for(0.05)
                if running(froze) == 10 and running(lives) == 10:
                    break
            assert (running(froze), running(lives)) == (10, 10)
        stack.enter_context(frozen(froze))
        if wait_s:
            seconds_until(lambda: 0.0 in up(gateway), 30)
        report = delete(gateway, "/v1/runs/doomed?wait_ms=3000")
        print(report)
        statuses = [call.result(timeout=60) for call in calls]
        assert set(statuses) <= {200, 409}
        # The server that lives may have ended some meanwhile, also of those that were lost at the frozen one.
        cancelled = report["queued"] + report["running"]
        assert cancelled >= statuses.count(409) if wait_s else cancelled == statuses.count(409)
        assert report["freed"] + report["unconfirmed"] == report["running"]
        if wait_s:
            assert report["unconfirmed"] >= 1, "the frozen server may hold what was lost there"
        else:
            assert (report["running"], report["unconfirmed"]) == (20, 10), "the frozen server holds ten"
        seconds_until(lambda: running(lives) == 0, 30)
    # It still held them when it was thawed, and lets them go now.
    took = seconds_until(lambda: running(froze) == 0, 60)
    print(f"the thawed server was free after {took:.1f} s")
    gateway.until(gateway.is_empty, 30)
