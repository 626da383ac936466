"""Embeddings: 500 concurrent calls with one input each, against the same calls one by one.

Two servers stand behind the gateway. The embedded engine computes real vectors on the CPU. A model of a GPU server over
HTTP computes one request at a time: a pass takes 5 ms and 0.02 ms for each input. Each arm is measured with batching
windows (`adaptive`) and without (`off`), in alternating rounds. `one_by_one` sends each call after the answer of the
one before, over one connection. `concurrent` are 500 connections that do so at the same time.

Required: with windows at least 5 times the throughput of one by one. The workers accept all 500 calls at once, so that
the queue time is the time for which the scheduler holds a call, and that of the gateway's own event loop. All processes
share the machine's cores with the clients, so that ratios count, not the figures themselves.

`virtual` is the scheduler before the model of the GPU server in virtual time, where only the scheduler's decisions
count. Required there: the same ratio, and a p95 of the queue time within the window of the lane.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, PooledInputs
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.plans import Ended
from inferry.domain.routes import BatchKey, RouteKey, Task
from inferry.domain.sampling import Sampling
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.scheduling.scheduler import Scheduler
from inferry.sim.rng import named_rng

CONCURRENT = 500
CALLS_PER_CONNECTION = 6
ONE_BY_ONE = 100
ROUNDS = 3
PASS_S = 0.005
INPUT_S = 0.00002
WINDOW_MS = DEFAULT_LANES[Lane.P1].coalesce_ms
MIN_RATIO = 5.0
THINK_S = 0.01
WINDOWS: tuple[Literal["adaptive", "off"], ...] = ("adaptive", "off")
_GATEWAY_PORT, _SERVER_PORT = 18_741, 18_742


class Connection:
    """A keep-alive connection that embeds one text after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", _GATEWAY_PORT))

    async def embed(self, text: str) -> float:
        """One call; returns its queue time in milliseconds."""
        body = json.dumps({"model": "m", "input": text, "encoding_format": "base64"}).encode()
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._writer.write(head + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        answer = await self._reader.readexactly(int(headers["content-length"]))
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{lines[0]}: {answer[:200]!r}")
        return float(headers["x-inferry-queue-ms"])

    def close(self) -> None:
        self._writer.close()


async def serve_model() -> None:
    """The model of a GPU server: requests are computed one after another."""
    computing = asyncio.Lock()

    async def embeddings(request: web.Request) -> web.Response:
        inputs = (await request.json())["input"]
        inputs = [inputs] if isinstance(inputs, str) else inputs
        async with computing:
            await asyncio.sleep(PASS_S + INPUT_S * len(inputs))
        data = [{"index": index, "object": "embedding", "embedding": "AACAPw=="} for index in range(len(inputs))]
        usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
        return web.json_response({"object": "list", "data": data, "model": "m", "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": 8192}]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", _SERVER_PORT).start()
    await asyncio.Event().wait()


def virtual(clients: int, window: Literal["adaptive", "off"]) -> dict[str, float]:
    """Clients in virtual time. Each sends its next call up to `THINK_S` after the answer of the one before."""
    rng = named_rng(1, "embeddings")
    policy = replace(DEFAULT_LANES[Lane.P1], window=window)
    scheduler = Scheduler(dict.fromkeys(Lane, policy))
    capacity = Capacity(sequences=1024)
    scheduler.observe(
        WorkerView(worker="w", models=frozenset({"m"}), phase=Phase.READY, capacity=capacity, observed_at=0.0), 0.0
    )
    events = sorted((rng.uniform(0, THINK_S), number, "") for number in range(clients))
    waits: list[float] = []
    sent = passes = 0
    now = free_at = 0.0
    while sent < clients * CALLS_PER_CONNECTION * 10:
        now = events[0][0]
        while events and events[0][0] == now:
            _, number, ended = heappop(events)
            if ended:
                scheduler.progress(ended, Ended(), now)
            if number >= 0:
                sent += 1
                scheduler.offer(_job(f"{number}-{sent}", now), now)
        tick = scheduler.tick(now)
        for plan in tick.plans:
            passes += 1
            free_at = max(now, free_at) + PASS_S + INPUT_S * len(plan.jobs)
            for job in plan.jobs:
                waits.append((now - job.arrived_at) * 1000)
                heappush(events, (free_at, -1, job.job_id))
                heappush(events, (free_at + rng.uniform(0, THINK_S), int(job.job_id.split("-")[0]), ""))
        if tick.wake_at is not None:
            heappush(events, (tick.wake_at, -1, ""))
    return {
        "calls_per_s": round(sent / now, 1),
        "calls_per_pass": round(sent / passes, 1),
        "queue_ms_p50": round(statistics.median(waits), 2),
        "queue_ms_p95": round(statistics.quantiles(waits, n=20)[-1], 2),
        "queue_ms_max": round(max(waits), 2),
    }


def _job(job_id: str, now: float) -> InferenceJob:
    route = RouteKey("m", pooled=True)
    none = Estimate.exactly(0)
    return InferenceJob(
        job_id=job_id,
        tenant="a",
        run_id=job_id,
        step_id=job_id,
        lane=Lane.P1,
        route=route,
        batch_key=BatchKey(route, task=Task.EMBED),
        footprint=Footprint(Estimate.exactly(8), none, none),
        token_budget=0,
        prompt_hash="",
        arrived_at=now,
        max_wait_s=1.0,
        payload=Payload(api="embeddings", body=b"{}", sampling=Sampling(), pooled=PooledInputs(1)),
    )


@contextmanager
def gateway(worker: dict[str, Any], window: str) -> Iterator[None]:
    """`inferry serve` before one worker."""
    config = {"workers": [worker], "lanes": {"P1": {"window": window}}, "ledger": "sqlite:///:memory:"}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "inferry.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "inferry", "serve", "--config", "inferry.yaml", "--port", str(_GATEWAY_PORT)]
        with _process(command, directory):
            asyncio.run(_until_ready())
            yield


@contextmanager
def _process(command: list[str], directory: str | None = None) -> Iterator[None]:
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


async def _until_ready() -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                connection = await Connection.open()
                await connection.embed("ready?")
                connection.close()
                return
            except (OSError, RuntimeError, KeyError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.2)


async def _calls(connection: Connection, number: int) -> list[float]:
    return [await connection.embed(f"text {number} {index}") for index in range(CALLS_PER_CONNECTION)]


async def _round() -> dict[str, float]:
    connections = [await Connection.open() for _ in range(CONCURRENT)]
    for connection in connections[:20]:
        await connection.embed("warm up")
    began = time.perf_counter()
    for number in range(ONE_BY_ONE):
        await connections[0].embed(f"text {number}")
    one_by_one = ONE_BY_ONE / (time.perf_counter() - began)
    began = time.perf_counter()
    found = await asyncio.gather(*(_calls(one, number) for number, one in enumerate(connections)))
    concurrent = CONCURRENT * CALLS_PER_CONNECTION / (time.perf_counter() - began)
    waits = [wait for own in found for wait in own[1:]]  # without the burst of first calls
    for connection in connections:
        connection.close()
    return {
        "one_by_one_per_s": one_by_one,
        "concurrent_per_s": concurrent,
        "ratio": concurrent / one_by_one,
        "queue_ms_p50": statistics.median(waits),
        "queue_ms_p95": statistics.quantiles(waits, n=20)[-1],
    }


async def _rounds(count: int) -> list[dict[str, float]]:
    return [await _round() for _ in range(count)]


def _median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}


def measure() -> dict[str, Any]:
    """Every worker with and without windows: medians over rounds, and whether the requirements are met."""
    workers = {
        "embedded": {
            "kind": "embedded",
            "name": "own",
            "models": ["m"],
            "capacity": "fixed",
            "max_sequences": 1024,
            "chunk_tokens": 1024,
        },
        "http": {
            "kind": "vllm",
            "name": "up",
            "url": f"http://127.0.0.1:{_SERVER_PORT}",
            "tasks": ["embed"],
            "capacity": "fixed",
            "max_sequences": 1024,
        },
    }
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {name: {"adaptive": [], "off": []} for name in workers}
    with _process([sys.executable, "-m", "benchmarks.embeddings"]):
        for name, worker in workers.items():
            for number in range(2 * ROUNDS):
                window = WINDOWS[number % 2]
                with gateway(worker, window):
                    rounds[name][window] += asyncio.run(_rounds(1))
                print(name, window, _median(rounds[name][window][-1:]), flush=True)
    found = {name: {window: _median(one) for window, one in arms.items()} for name, arms in rounds.items()}
    alone = virtual(1, "adaptive")
    together = {window: virtual(CONCURRENT, window) for window in WINDOWS}
    ratio = together["adaptive"]["calls_per_s"] / alone["calls_per_s"]
    return {
        "concurrent": CONCURRENT,
        "window_ms": WINDOW_MS,
        "virtual": {"one_by_one": alone, **together, "ratio": round(ratio, 1)},
        "medians": found,
        "is_five_times_one_by_one": ratio >= MIN_RATIO
        and all(arms["adaptive"]["ratio"] >= MIN_RATIO for arms in found.values()),
        "is_virtual_p95_within_window": together["adaptive"]["queue_ms_p95"] <= WINDOW_MS,
        "rounds": rounds,
    }


if __name__ == "__main__":
    asyncio.run(serve_model())
