"""A batch of 50,000 requests: memory of the gateway, time, live calls beside it, time until a cancel has effect.

One gateway before a server with 64 slots, 160 ms per call. Live calls in P0 arrive at a fixed rate, first alone, then
beside the batch. A second batch is cancelled while it runs; it has stopped when no job is in flight.
"""

import asyncio
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.serving import free_port, run_gateway, run_process

ITEMS = 50_000
SLOTS, SERVICE_MS = 64, 160
LIVE_PER_S = 20.0
IDLE_PROBES = 200
PROMPT_WORDS = 100
P0_TARGET_MS = 200.0
CHAT = "/v1/chat/completions"


def measure(items: int = ITEMS, idle_probes: int = IDLE_PROBES) -> dict[str, Any]:
    engine_port = free_port()
    command = [sys.executable, "-m", "benchmarks.slot_server", str(engine_port), str(SLOTS), str(SERVICE_MS)]
    with tempfile.TemporaryDirectory() as name, run_process(command):
        url = f"http://127.0.0.1:{engine_port}"
        worker = {"kind": "openai", "name": "slots", "url": url, "models": ["m"], "max_sequences": SLOTS}
        lanes = {"P0": {"ttft_ms": P0_TARGET_MS}}
        config = {"workers": [worker], "lanes": lanes, "ledger": f"sqlite:///{Path(name) / 'ledger.db'}"}
        with run_gateway(config) as (port, gateway):
            return asyncio.run(_measure(port, gateway.pid, items, idle_probes))


async def _measure(port: int, pid: int, items: int, idle_probes: int) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as http:
        idle = [await _live_call(http) for _ in range(10)] and await _live_calls(http, idle_probes)
        memory = _Memory(pid)
        content = b"".join(_line(number) for number in range(items))
        began = time.monotonic()
        file = await _upload(http, content)
        uploaded = time.monotonic()
        batch = await _create(http, file)
        with memory:
            live, ended = await _live_until_ended(http, batch, memory)
        seconds = time.monotonic() - uploaded
        assert ended["status"] == "completed", ended
        assert ended["request_counts"] == {"total": items, "completed": items, "failed": 0}, ended
        cancel = await _cancel_midway(http, file, items)
    print(
        f"{items} items in {seconds:.1f} s; memory {memory.before_mb:.0f} MB before, {memory.most_mb:.0f} MB at most; "
        f"P0 p95 {_p95(idle):.1f} ms alone, {_p95(live):.1f} ms beside it; cancelled in {cancel['stopped_ms']:.0f} ms",
        flush=True,
    )
    return {
        "items": items,
        "file_mb": len(content) / 2**20,
        "upload_s": uploaded - began,
        "batch_s": seconds,
        "items_per_s": items / seconds,
        "memory_before_mb": memory.before_mb,
        "memory_most_mb": memory.most_mb,
        "live_alone_ms": _spread(idle),
        "live_beside_ms": _spread(live),
        "cancel": cancel,
    }


def _line(number: int) -> bytes:
    text = f"request {number} " + "word " * PROMPT_WORDS
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


async def _upload(http: aiohttp.ClientSession, content: bytes) -> str:
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", io.BytesIO(content), filename="in.jsonl")
    async with http.post("/v1/files", data=form) as response:
        return str((await response.json())["id"])


async def _create(http: aiohttp.ClientSession, file: str) -> str:
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    async with http.post("/v1/batches", json=body) as response:
        return str((await response.json())["id"])


async def _status(http: aiohttp.ClientSession, batch: str) -> dict[str, Any]:
    async with http.get(f"/v1/batches/{batch}") as response:
        found: dict[str, Any] = await response.json()
        return found


async def _live_call(http: aiohttp.ClientSession) -> float:
    """Milliseconds to the first token of a call in P0."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
    began = time.monotonic()
    async with http.post(CHAT, json=body, headers={"x-inferry-lane": "P0"}) as response:
        assert response.status == 200, await response.text()
        await response.content.readuntil(b"\n\n")
        first = time.monotonic()
        await response.read()
    return (first - began) * 1000


async def _live_calls(http: aiohttp.ClientSession, count: int) -> list[float]:
    """Calls at a fixed rate, however long each takes."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(_live_call(http)))
        await asyncio.sleep(1 / LIVE_PER_S)
    return list(await asyncio.gather(*tasks))


async def _live_until_ended(
    http: aiohttp.ClientSession, batch: str, memory: "_Memory"
) -> tuple[list[float], dict[str, Any]]:
    times: list[float] = []
    while (found := await _status(http, batch))["status"] in ("validating", "in_progress", "finalizing"):
        memory.sample()
        times += await _live_calls(http, 10)
    return times, found


async def _cancel_midway(http: aiohttp.ClientSession, file: str, items: int) -> dict[str, Any]:
    batch = await _create(http, file)
    while (await _status(http, batch))["request_counts"]["completed"] < min(items // 10, 1000):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    began = time.monotonic()
    async with http.post(f"/v1/batches/{batch}/cancel") as response:
        assert response.status == 200, await response.text()
    answered = time.monotonic()
    while await _in_flight(http):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    stopped = time.monotonic()
    while (found := await _status(http, batch))["status"] == "cancelling":  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return {
        "answered_ms": (answered - began) * 1000,
        "stopped_ms": (stopped - began) * 1000,
        "finalized_s": time.monotonic() - began,
        "request_counts": found["request_counts"],
    }


async def _in_flight(http: aiohttp.ClientSession) -> float:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("inferry_jobs_in_flight"))


class _Memory:
    """Resident memory of a process in megabytes."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.before_mb = self._resident("VmRSS")
        self.most_mb = self.before_mb

    def __enter__(self) -> "_Memory":
        return self

    def __exit__(self, *_: object) -> None:
        self.most_mb = max(self.most_mb, self._resident("VmHWM"))

    def sample(self) -> None:
        self.most_mb = max(self.most_mb, self._resident("VmRSS"))

    def _resident(self, name: str) -> float:
        line = next(line for line in self._status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024


def _p95(times: list[float]) -> float:
    return sorted(times)[int(0.95 * (len(times) - 1))]


def _spread(times: list[float]) -> dict[str, float]:
    attained = sum(time <= P0_TARGET_MS for time in times) / len(times)
    return {
        "calls": len(times),
        "p50": statistics.median(times),
        "p95": _p95(times),
        "max": max(times),
        "within_target": attained,
    }
