"""Overflow over real sockets: an own server that goes down, and a scripted hosted API with a price."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from aiohttp import web

from inferry.cli.wiring import Service
from inferry.domain.workers import Phase
from inferry.ledger.stores.opening import open_queries
from support.gateway_process import GatewayProcess
from support.serving import Serving, get, post
from support.upstream import Upstream

CALL = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
BODY = json.dumps(CALL, separators=(",", ":")).encode()
PRICE = 1.0
MOST_NANOS = 1000 * (len(BODY) + 64 + 3) + 2
"""What a call reserves: a token for every byte of its body, 64 for the chat template, and its output limit."""
COST_NANOS = 1000 * (12 + 3)
"""What it costs by the usage that the hosted API reports."""
LIMIT_S = 120.0


def a_config(own: Upstream, hosted: Upstream, ceiling_nanos: int) -> dict[str, Any]:
    return {
        "workers": [
            {"kind": "vllm", "name": "own", "url": own.url, "models": ["m"]},
            {"kind": "openai", "name": "hosted", "url": hosted.url, "models": ["m"], "overflow": True},
        ],
        "overflow": {
            "day_money_ceiling": ceiling_nanos / 1e9,
            "prices": {"m": {"input": PRICE, "output": PRICE}},
        },
        "health": {"liveness_interval_s": 0.1, "liveness_timeout_s": 0.2, "no_worker_timeout_s": 0.2},
    }


async def until_own(service: Service, *, is_up: bool) -> None:
    while service.pool.serves("m") is not is_up or service.pool.view("hosted").phase is not Phase.READY:
        await asyncio.sleep(0.02)


def call(url: str) -> tuple[int, str | None]:
    status, headers, _ = post(url, "/v1/chat/completions", BODY, {"x-inferry-lane": "P0"})
    return status, headers.get("x-inferry-worker")


def test_calls_overflow_while_the_own_server_is_down_until_the_ceiling_and_again_after_a_restart(
    tmp_path: Path,
) -> None:
    async def act() -> None:
        own, hosted = Upstream(), Upstream()
        async with hosted, asyncio.timeout(LIMIT_S):
            await own.__aenter__()
            # Two calls fit, one after the other: their cost, and the reservation of the second.
            config = a_config(own, hosted, COST_NANOS + MOST_NANOS)
            gateway = Serving(tmp_path, config=config)
            await asyncio.to_thread(gateway.__enter__)
            try:
                await asyncio.to_thread(gateway.run, until_own(gateway.service, is_up=True))
                assert await asyncio.to_thread(call, gateway.url) == (200, "own")
                await own.__aexit__()
                await asyncio.to_thread(gateway.run, until_own(gateway.service, is_up=False))
                assert [await asyncio.to_thread(call, gateway.url) for _ in range(2)] == [(200, "hosted")] * 2
                assert (await asyncio.to_thread(call, gateway.url))[0] == 503
                _, _, page = await asyncio.to_thread(get, gateway.url, "/metrics")
                assert 'inferry_overflow_jobs_total{reason="target"} 2' in page
                assert 'inferry_overflow_refusals_total{limit="day_money_ceiling"} 1' in page
            finally:
                await asyncio.to_thread(gateway.__exit__, None, None, None)
            assert len(hosted.bodies) == 2
            with open_queries(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
                rows = [row for row in ledger.jobs(limit=10) if row.worker == "hosted"]
            assert [json.loads(row.decision or "")["overflow"] for row in rows] == [
                {"reason": "target", "cost_nanos": COST_NANOS}
            ] * 2

            await own.__aenter__()
            again = Serving(tmp_path, config=config)
            await asyncio.to_thread(again.__enter__)
            try:
                await asyncio.to_thread(again.run, until_own(again.service, is_up=True))
                await own.__aexit__()
                await asyncio.to_thread(again.run, until_own(again.service, is_up=False))
                assert (await asyncio.to_thread(call, again.url))[0] == 503, "what the ledger has spent counts"
            finally:
                await asyncio.to_thread(again.__exit__, None, None, None)
            assert len(hosted.bodies) == 2

    asyncio.run(act())


def test_a_call_in_flight_at_a_kill_counts_for_the_ceiling_after_the_restart(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def hang(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.set()
        return await asyncio.Future()

    async def act() -> None:
        own, hosted = Upstream(), Upstream()
        async with hosted, asyncio.timeout(LIMIT_S):
            await own.__aenter__()
            gateway = GatewayProcess(tmp_path, a_config(own, hosted, 2 * MOST_NANOS - 1))
            await asyncio.to_thread(gateway.__enter__)
            hosted.script = hang
            await own.__aexit__()
            await asyncio.to_thread(gateway.until, lambda: own_is_down(gateway), LIMIT_S)
            lost = asyncio.create_task(asyncio.to_thread(call, gateway.url))
            await asked.wait()
            os.kill(gateway.pid, signal.SIGKILL)
            await asyncio.to_thread(gateway.wait)
            await asyncio.gather(lost, return_exceptions=True)
            assert calls_of(hosted) == 1

            await own.__aenter__()
            again = GatewayProcess(tmp_path, a_config(own, hosted, 2 * MOST_NANOS - 1))
            await asyncio.to_thread(again.__enter__)
            try:
                await own.__aexit__()
                await asyncio.to_thread(again.until, lambda: own_is_down(again), LIMIT_S)
                assert (await asyncio.to_thread(call, again.url))[0] == 503
                assert again.metric("inferry_overflow_refusals_total") == 1
            finally:
                await asyncio.to_thread(again.__exit__)
            assert calls_of(hosted) == 1

    asyncio.run(act())


def own_is_down(gateway: GatewayProcess) -> bool:
    return gateway.metric_by_label("inferry_worker_up")['{worker="own"}'] == 0


def calls_of(hosted: Upstream) -> int:
    return sum(body["messages"] == CALL["messages"] for body in hosted.bodies)
