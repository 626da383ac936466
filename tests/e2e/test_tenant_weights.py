"""`tenants.<name>.weight` in the running gateway: busy tenants are served in proportion to it."""

import asyncio
import json
import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from inferry.domain.workers import Capacity
from support.scripted_gateway import ScriptedGateway

CALLS = 120
COUNTED = 120
"""Jobs that are counted: both tenants have work until the last of them."""


async def call(port: int, tenant: str, number: int) -> bytes:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"call {number:04}"}], "max_tokens": 3})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-inferry-tenant: {tenant}\r\ncontent-length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\nconnection: close\r\n\r\n{body}".encode())
    answer = await reader.read(-1)
    writer.close()
    return answer.split(b"\r\n")[0]


def metrics(gateway: ScriptedGateway) -> str:
    with urlopen(f"{gateway.url}/metrics") as answer:
        text: bytes = answer.read()
    return text.decode()


def queue_depth(gateway: ScriptedGateway) -> float:
    return sum(map(float, re.findall(r"inferry_queue_depth\{.*\} (.*)", metrics(gateway))))


async def open_gate(gateway: ScriptedGateway, is_open: bool) -> None:
    if is_open:
        gateway.worker.gate.set()
    else:
        gateway.worker.gate.clear()


async def load(gateway: ScriptedGateway) -> list[bytes]:
    gateway.run(open_gate(gateway, False))
    calls = [
        asyncio.create_task(call(gateway.port, tenant, number))
        for number in range(CALLS)
        for tenant in ("heavy", "light")
    ]
    while await asyncio.to_thread(queue_depth, gateway) < 2 * CALLS - 2:
        await asyncio.sleep(0.02)
    gateway.run(open_gate(gateway, True))
    return await asyncio.gather(*calls)


@pytest.mark.parametrize(("heavy", "light"), [(3.0, 1.0), (1.0, 1.0)])
def test_busy_tenants_are_served_in_proportion_to_their_weights(tmp_path: Path, heavy: float, light: float) -> None:
    config = {"tenants": {"heavy": {"weight": heavy}, "light": {"weight": light}}}
    with ScriptedGateway(tmp_path, config, capacity=Capacity(sequences=2)) as gateway:
        assert set(asyncio.run(load(gateway))) == {b"HTTP/1.1 200 OK"}
        order = [job.tenant for plan in gateway.worker.plans for job in plan.jobs]
    counted = order[2 : 2 + COUNTED]
    assert counted.count("heavy") / COUNTED == pytest.approx(heavy / (heavy + light), rel=0.05)


def test_the_fairness_of_every_lane_is_a_metric(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        lanes = re.findall(r'inferry_fairness_index\{lane="(P\d)"\} 1\.0', metrics(gateway))
    assert lanes == ["P0", "P1", "P2"]
