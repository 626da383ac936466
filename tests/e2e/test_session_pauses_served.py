"""Runs pause in a served gateway: requests, metrics and the worker's KV, in virtual time."""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.domain.workers import Capacity
from inferry.ingress.http import lifecycle
from support.scripted_worker import ScriptedWorker
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock

PAUSE_S = 5.0
CALL_S = 1.0
TOOL_S = 1.0
PORT = 20_000
"""The first port that a loop of `run_virtual_net` gives."""


async def request(method: str, path: str, body: Any = None, **headers: str) -> tuple[str, str]:
    """Head and body of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    content = b"" if body is None else json.dumps(body).encode()
    fields = {"host": "localhost", "connection": "close", "content-length": str(len(content)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + content)
    head, _, answer = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    assert " 200 " in head.partition("\r\n")[0], answer
    return head, answer


async def call(run: str) -> float:
    """A call with 400 tokens of KV: two runs fit. Returns its queue wait in seconds."""
    body = {"model": "m", "prompt": list(range(390)), "max_tokens": 10}
    head, _ = await request("POST", "/v1/completions", body, **{"x-inferry-run-id": run})
    (wait_ms,) = re.findall(r"x-inferry-queue-ms: (\S+)", head)
    return float(wait_ms) / 1000


async def agent(run: str) -> list[float]:
    """Four calls with tools between them."""
    waits = []
    for _ in range(4):
        waits.append(await call(run))
        await asyncio.sleep(TOOL_S)
    return waits


async def session_metrics() -> tuple[float, ...]:
    """Resident runs, paused calls, pauses, and their seconds."""
    _, page = await request("GET", "/metrics")
    names = ("resident_runs", "paused_calls", "session_pauses_total", "session_pause_seconds_total")
    return tuple(float(re.findall(rf"^inferry_{name} (\S+)$", page, re.MULTILINE)[0]) for name in names)


async def play() -> None:
    """The runs a and b fill the KV and call every two seconds; c arrives 2.5 s after them."""
    agents = [asyncio.create_task(agent(run)) for run in ("a", "b")]
    await asyncio.sleep(2.5)
    late = asyncio.create_task(call("c"))
    await asyncio.sleep(3.0)
    assert await session_metrics() == (2, 1, 1, 0)  # c is paused although the worker has free capacity
    assert await late == pytest.approx(PAUSE_S, abs=0.1)
    for waits in await asyncio.gather(*agents):
        assert max(waits) < 0.1  # the runs that were there first do not wait for it
    resident, paused, pauses, pause_s = await session_metrics()
    assert (resident, paused, pauses) == (2, 0, 1)  # c, and the one of a and b that was idle for less time
    assert pause_s == pytest.approx(PAUSE_S, abs=0.1)


def test_a_run_whose_kv_does_not_fit_pauses_for_a_bounded_time(tmp_path: Path) -> None:
    async def main() -> None:
        capacity = Capacity(sequences=8, kv_tokens=1_000)
        worker = ScriptedWorker(words=("one",), pause_s=CALL_S, clock=LoopClock(), capacity=capacity)
        config = {
            "ledger": f"sqlite:///{tmp_path / 'ledger.db'}",
            "auth": {"mode": "off", "allow_remote": True},
            "sessions": {"pause": True, "max_pause_s": PAUSE_S},
        }
        service = wiring.assemble(parse(config), [worker], {}, LoopClock())
        service.start()
        stop = lifecycle.StopSignals()
        serving = asyncio.create_task(
            lifecycle.serve(
                service.app, service.gateway, socket.socket(), stop, idle_timeout_s=60.0, drain_timeout_s=60.0
            )
        )
        async with asyncio.timeout(600):
            while not service.gateway.is_ready:
                await asyncio.sleep(0.01)
            await play()
        stop.request()
        await serving
        await service.close()

    run_virtual_net(main())
