"""Deadlines of running calls over HTTP: an error status before the first byte, in-band after it. In virtual time."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.cli.listening import bind
from inferry.ingress.http import lifecycle
from support.scripted_worker import ScriptedWorker
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock
from support.waiting import async_until

CALL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
WORDS = tuple(f" word{number}" for number in range(100))
PAUSE_S = 0.05
LIMIT_S = 0.32
WRITTEN = 7
"""Words within the limit: the first comes at once."""


async def post(port: int, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
    """Status and body of a call with a connection of its own."""
    raw = json.dumps(body)
    given = {"host": "x", "content-length": str(len(raw)), "connection": "close", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n{raw}".encode())
    answer = (await reader.read(-1)).decode()
    writer.close()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("server", "headers", "code"),
    [
        ({}, {"x-inferry-deadline-ms": f"{LIMIT_S * 1000:.0f}"}, "deadline_exceeded"),
        ({"request_timeout_s": LIMIT_S}, {}, "request_timeout"),
    ],
)
def test_a_call_that_runs_too_long_is_ended(
    tmp_path: Path, server: dict[str, float], headers: dict[str, str], code: str
) -> None:
    async def scenario() -> None:
        auth = {"mode": "off", "allow_remote": True}  # a socket pair has no address
        config = parse({"ledger": f"sqlite:///{tmp_path / 'ledger.db'}", "server": server, "auth": auth})
        worker = ScriptedWorker(words=WORDS, pause_s=PAUSE_S, clock=LoopClock())
        service, stop, listening = (
            wiring.assemble(config, [worker], {}, LoopClock()),
            lifecycle.StopSignals(),
            asyncio.Event(),
        )
        sock = bind("127.0.0.1", 0, 1).sockets[0]
        port = sock.getsockname()[1]
        service.start()
        serving = asyncio.create_task(
            lifecycle.serve(
                service.app,
                service.gateway,
                sock,
                stop,
                idle_timeout_s=60,
                drain_timeout_s=60,
                on_listening=listening.set,
            )
        )
        await listening.wait()
        await async_until(lambda: service.gateway.is_ready)
        began = LoopClock().now()
        status, body = await post(port, CALL, headers)
        assert LoopClock().now() - began == pytest.approx(LIMIT_S, abs=0.01)
        assert (status, json.loads(body)["error"]["code"]) == (504, code)
        status, events = await post(port, CALL | {"stream": True}, headers)
        assert status == 200
        assert [word for word in WORDS if f'"{word}"' in events] == list(WORDS[:WRITTEN])
        assert code in events.split("data: ")[-1] or code in events.split("data: ")[-2]
        assert service.gateway.in_flight == 0
        stop.request()
        await serving
        await service.close()

    run_virtual_net(scenario())
