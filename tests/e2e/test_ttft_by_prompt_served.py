"""A call's own TTFT target, over HTTP: the header, the ledger and the metric agree. In virtual time."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.cli.listening import bind
from inferry.ingress.http import lifecycle
from support.scripted_worker import ScriptedWorker
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock
from support.waiting import async_until

HEADER = "x-inferry-ttft-ms-per-1k-tokens"
TTFT_S = 0.5
PROMPT = list(range(2_000))
LATE_S = 1.2
"""Later than `TTFT_S`; in time with 400 ms for each of the two thousand tokens."""


async def exchange(port: int, head: str, raw: str = "") -> tuple[int, str]:
    """Status and body of a request with a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\nhost: x\r\nconnection: close\r\n\r\n{raw}".encode())
    answer = (await reader.read(-1)).decode()
    writer.close()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


def attained_counts(metrics: str) -> dict[str, float]:
    """Calls of P0 by the label `attained`."""
    rows = [row for row in metrics.splitlines() if row.startswith("inferry_slo_attainment_total{")]
    return {
        row.split('attained="')[1].split('"')[0]: float(row.rsplit(" ", 1)[1]) for row in rows if 'lane="P0"' in row
    }


@pytest.mark.parametrize(
    ("lane_ms", "header_ms", "attained"),
    [(0, None, False), (0, 400, True), (0, 300, False), (400, None, True), (400, 0, False)],
    ids=["plain", "the header allows it", "the header allows less", "the lane allows it", "the header allows none"],
)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_target_of_a_call_grows_with_its_prompt(
    tmp_path: Path, lane_ms: int, header_ms: int | None, attained: bool, is_streamed: bool
) -> None:
    async def scenario() -> None:
        config = parse(
            {
                "ledger": f"sqlite:///{tmp_path / 'ledger.db'}",
                "auth": {"mode": "off", "allow_remote": True},  # a socket pair has no address
                "lanes": {"P0": {"ttft_ms": TTFT_S * 1000, "itl_ms": 30, "ttft_ms_per_1k_tokens": lane_ms}},
            }
        )
        worker = ScriptedWorker(clock=LoopClock())
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
        worker.gate.clear()
        asyncio.get_running_loop().call_later(LATE_S, worker.gate.set)
        raw = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 3, "stream": is_streamed})
        head = f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(raw)}\r\nx-inferry-lane: P0"
        status, _ = await exchange(port, head + ("" if header_ms is None else f"\r\n{HEADER}: {header_ms}"), raw)
        assert status == 200
        _, metrics = await exchange(port, "GET /metrics HTTP/1.1")
        assert attained_counts(metrics) == {"true": float(attained), "false": float(not attained)}
        stop.request()
        await serving
        await service.close()

    run_virtual_net(scenario())
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as ledger:
        rows = ledger.execute("SELECT attained, prompt_tokens FROM attempts WHERE lane = 'P0'").fetchall()
    assert rows == [(attained, len(PROMPT))]
