"""A server for tests of the load generator, and calls of the load test against it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from inferry.domain.lanes import Lane
from inferry.loadgen.load_test import LoadTest, run_load_test
from inferry.loadgen.result import Result
from inferry.loadgen.traffic import Bursts, TrafficOptions
from inferry.sim.workload import SloTarget
from support.upstream import DONE, Upstream, begin, chunk, role, usage
from support.virtual_net import run_virtual_net

PROMISES = dict.fromkeys(Lane, SloTarget(30.0, 10.0))


CROWD = TrafficOptions(bursts=Bursts(12, 0.2, 0.1), seconds=0.15, prompt_tokens=(20, 40), output_tokens=(4, 4))


Script = Callable[[Upstream, web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def is_trial(request: web.Request) -> bool:
    return request.headers.get("x-inferry-run-id", "").endswith("trial")


async def answer(
    request: web.Request, body: dict[str, Any], pause_s: float = 0.0, last: bytes = b""
) -> web.StreamResponse:
    """As many tokens as were asked for; `last` instead of a proper end."""
    chat = "messages" in body
    response = await begin(request)
    await response.write(role() if chat else b": soon\n\n")
    for number in range(body["max_tokens"]):
        is_end = number == body["max_tokens"] - 1
        if is_end and last:
            await response.write(last)
            return response
        await response.write(chunk("x", "length" if is_end else None, chat=chat))
        if pause_s:
            await asyncio.sleep(pause_s)
    await response.write(usage(len(body.get("prompt", "")), body["max_tokens"]) + DONE)
    return response


async def obliging(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await answer(request, body)


def bench(script: Script = obliging, traffic: TrafficOptions = CROWD, key: str | None = None, **more: Any) -> Result:
    """A bench against a scripted server, begun as far into the traffic as its first call."""
    return benched(script, traffic, key, **more)[0]


def benched(
    script: Script = obliging, traffic: TrafficOptions = CROWD, key: str | None = None, **more: Any
) -> tuple[Result, Upstream]:
    async def main() -> tuple[Result, Upstream]:
        async with Upstream(script) as upstream:
            wanted = LoadTest(url=upstream.url, model="m", traffic=traffic, slo_targets=PROMISES, **more)
            return await run_load_test(wanted, key, lambda _: None, lambda _: None), upstream

    return run_virtual_net(main())


def calls_of(upstream: Upstream) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Bodies and headers of what is no trial."""
    pairs = zip(upstream.bodies, upstream.headers, strict=True)
    return [(body, headers) for body, headers in pairs if not headers.get("x-inferry-run-id", "").endswith("trial")]
