"""Predicted KV peaks in the running gateway: a worker is not sent more calls than its KV holds."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.several_servers import SeveralServers
from support.upstream import Upstream, well_behaved

BODY = {"model": "m", "prompt": list(range(1, 11)), "max_tokens": 20}
"""Ten prompt tokens and 20 output tokens: a peak of 30."""


async def wait_for_release(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await upstream.release.wait()
    return await well_behaved(upstream, request, body)


async def release(upstream: Upstream) -> None:
    upstream.release.set()


@pytest.mark.parametrize("kv_packing", ["sum", "timed"])
@pytest.mark.parametrize(("kv_tokens", "at_once"), [(60, 2), (100, 3), (None, 5)])
def test_a_worker_gets_as_many_calls_as_their_predicted_peaks_fit(
    tmp_path: Path, kv_packing: str, kv_tokens: int | None, at_once: int
) -> None:
    workers = {"w": {"models": ["m"], "capacity": "fixed", "kv_tokens": kv_tokens, "kv_packing": kv_packing}}
    with SeveralServers(tmp_path, workers, {"lanes": {"P1": {"reserve": 0}}}) as gateway:
        upstream = gateway.upstreams["w"]
        upstream.script = wait_for_release

        async def calls() -> list[int]:
            tasks = [
                asyncio.create_task(asyncio.to_thread(gateway.call, "POST", "/v1/completions", BODY)) for _ in range(5)
            ]
            async with asyncio.timeout(120):
                while (len(upstream.running), await metric("inferry_queue_depth")) != (at_once, 5 - at_once):
                    await asyncio.sleep(0.01)
            assert await metric("inferry_worker_kv_predicted_tokens") == 30 * at_once
            gateway.run(release(upstream))
            return [answer.status for answer in await asyncio.gather(*tasks)]

        async def metric(name: str) -> float:
            return await asyncio.to_thread(gateway.metric, name)

        assert asyncio.run(calls()) == [200] * 5
