"""Lanes: what a batch backlog costs live calls.

One gateway with the embedded engine, three arms in turn, several rounds: idle; with 200 P2 jobs kept in the queue; and
the same load with lanes off (every call in one lane). The figure is the first-token time of the live calls.
"""

import asyncio
import random
import statistics
import time
from typing import Any

import aiohttp

from benchmarks.serving import run_gateway
from inferry.engine.bundled import BUNDLED_DIRECTORY

ROUNDS = 3
PROBES = 40
PROBES_LANES_OFF = 12
QUEUED = 200
RUNNING = 64
LIVE_SHAPE = {"prompt": 256, "output": 16}
BATCH_SHAPE = {"prompt": 256, "output": 128}
MODEL = "m"
CONFIG = {"workers": [{"name": "local", "kind": "embedded", "model": str(BUNDLED_DIRECTORY), "models": [MODEL]}]}


def measure() -> dict[str, Any]:
    with run_gateway(CONFIG) as (port, _):
        return asyncio.run(_measure(f"http://127.0.0.1:{port}"))


async def _measure(url: str) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        for seed in range(ROUNDS):
            rng = random.Random(seed)
            idle, loaded, depth = await live_ttft_ms(http, rng)
            async with _Backlog(http, rng, "P1"):
                lanes_off = await _probe_concurrently(http, rng, "P1", PROBES_LANES_OFF)
            rounds.append(
                {
                    "seed": seed,
                    "idle_ms": _spread(idle),
                    "backlog_ms": _spread(loaded),
                    "lanes_off_ms": _spread(lanes_off),
                    "queue_depth_at_the_end": depth,
                    "p95_ratio": p95(loaded) / p95(idle),
                    "p95_ratio_lanes_off": p95(lanes_off) / p95(idle),
                }
            )
            print(
                f"seed {seed}: p95 idle {p95(idle):.1f} ms, {QUEUED} P2 queued {p95(loaded):.1f} ms "
                f"({rounds[-1]['p95_ratio']:.2f}x), lanes off {p95(lanes_off):.0f} ms "
                f"({rounds[-1]['p95_ratio_lanes_off']:.0f}x)",
                flush=True,
            )
    return {
        "live_call": LIVE_SHAPE,
        "batch_job": BATCH_SHAPE,
        "queued": QUEUED,
        "probes_per_arm": PROBES,
        "rounds": rounds,
        "p95_ratio_median": statistics.median(one["p95_ratio"] for one in rounds),
        "p95_ratio_lanes_off_median": statistics.median(one["p95_ratio_lanes_off"] for one in rounds),
    }


async def live_ttft_ms(http: aiohttp.ClientSession, rng: random.Random) -> tuple[list[float], list[float], int]:
    """First-token times of live calls on the idle gateway and beside a batch backlog, and its depth at the end."""
    for _ in range(5):
        await _first_token(http, rng, "P0")
    idle = await _probe(http, rng, "P0", PROBES)
    async with _Backlog(http, rng, "P2") as backlog:
        loaded = await _probe(http, rng, "P0", PROBES)
        return idle, loaded, await backlog.depth()


class _Backlog:
    """Keeps the engine full and QUEUED jobs in the queue until the block ends."""

    def __init__(self, http: aiohttp.ClientSession, rng: random.Random, lane: str) -> None:
        self._http = http
        self._rng = rng
        self._lane = lane
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "_Backlog":
        self._tasks = [asyncio.create_task(self._keep_requesting()) for _ in range(QUEUED + RUNNING)]
        while await self.depth() < QUEUED * 0.9:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while await self.depth():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)

    async def depth(self) -> int:
        async with self._http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("inferry_queue_depth{"))

    async def _keep_requesting(self) -> None:
        while True:
            body = _body(self._rng, BATCH_SHAPE, stream=False)
            async with self._http.post("/v1/completions", json=body, headers={"x-inferry-lane": self._lane}) as answer:
                await answer.read()


async def _probe(http: aiohttp.ClientSession, rng: random.Random, lane: str, count: int) -> list[float]:
    times = []
    for _ in range(count):
        times.append(await _first_token(http, rng, lane))
        await asyncio.sleep(rng.uniform(0.02, 0.1))
    return times


async def _probe_concurrently(http: aiohttp.ClientSession, rng: random.Random, lane: str, count: int) -> list[float]:
    """For calls that each wait behind the whole backlog: 0.2 s apart, not sequential."""

    async def later(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return await _first_token(http, rng, lane)

    return list(await asyncio.gather(*(later(0.2 * number) for number in range(count))))


async def _first_token(http: aiohttp.ClientSession, rng: random.Random, lane: str) -> float:
    """Milliseconds from sending a call to its first token; the call is read to its end."""
    body = _body(rng, LIVE_SHAPE, stream=True)
    begin = time.perf_counter()
    first = 0.0
    async with http.post("/v1/completions", json=body, headers={"x-inferry-lane": lane}) as answer:
        async for line in answer.content:
            if not first and line.startswith(b"data: {"):
                first = (time.perf_counter() - begin) * 1000
    return first


def _body(rng: random.Random, shape: dict[str, int], *, stream: bool) -> dict[str, Any]:
    prompt = [rng.randrange(100, 3000) for _ in range(shape["prompt"])]
    return {"model": MODEL, "prompt": prompt, "max_tokens": shape["output"], "ignore_eos": True, "stream": stream}


def p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20, method="inclusive")[18]


def _spread(times: list[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(times), 2), "p95": round(p95(times), 2), "max": round(max(times), 2)}


if __name__ == "__main__":
    print(measure())
