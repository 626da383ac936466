"""Latency of a run's cancellation.

One gateway with the embedded engine in its own process, as `inferry serve` runs them. A run with sub-runs three levels
deep fills the engine and has 1,000 steps queued; one DELETE cancels it. Measured over many such runs: the time until
the answer that confirms that the engine has freed everything (`answer_ms` at the client that cancels, `took_ms` in the
gateway); the time until the last of 1,000 clients, all in one process, has its refusal; that the engine's own count
agrees; that steps that never ran have no usage; and that calls of another run are not affected.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import aiohttp

from benchmarks.serving import parse_metrics, run_gateway
from inferry.engine.bundled import BUNDLED_DIRECTORY
from inferry.ledger.stores.opening import open_queries

MODEL = "m"
ROUNDS = 110
RUNNING, QUEUED = 64, 1000
CHILDREN, GRANDCHILDREN = 4, 5
OTHER_RUNS = 2
"""Calls of another run beside the cancelled one."""
OTHER_TOKENS = 64
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 1000
KV_TOKENS = 65_536
MAX_CANCEL_MS = 250.0


def measure(rounds: int = ROUNDS, running: int = RUNNING, queued: int = QUEUED) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        url = f"sqlite:///{Path(directory) / 'ledger.db'}"
        with run_gateway({"ledger": url, "workers": [worker_for(running)]}) as (port, gateway):
            found = asyncio.run(_measure(port, gateway.pid, rounds, running, queued))
        return found | {"ledger": _ledger_check(url)}


def worker_for(running: int) -> dict[str, Any]:
    """Capacity for all running steps and for P1's reserve, independent of targets."""
    limits = {"max_sequences": running + 5, "kv_tokens": 2 * KV_TOKENS, "capacity": "fixed"}
    return {"name": "local", "kind": "embedded", "model": str(BUNDLED_DIRECTORY), "models": [MODEL], **limits}


async def _measure(port: int, pid: int, rounds: int, running: int, queued: int) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=None)
    told: list[dict[str, Any]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        Canceller(port) as canceller,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout) as http,
    ):
        os.nice(5)  # the process with the calls has lower priority than gateway, engine and canceller
        for number in range(rounds):
            told.append(await cancel_run(http, canceller, pid, number, running, queued))
            if number % 10 == 0:
                print(f"run {number}: {told[-1]}", flush=True)
    result = {
        "rounds": rounds,
        "asked_for": {"running": running, "queued": queued},
        "running": statistics.median(one["running"] for one in told),
        "queued": statistics.median(one["queued"] for one in told),
        "answer_ms": _spread([one["answer_ms"] for one in told]),
        "took_ms": _spread([one["took_ms"] for one in told]),
        "gateway_worked_ms": _spread([one["gateway_worked_ms"] for one in told]),
        "gateway_worked_until_all_told_ms": _spread([one["gateway_worked_until_all_told_ms"] for one in told]),
        "gateway_waited_for_a_core_ms": _spread([one["gateway_waited_for_a_core_ms"] for one in told]),
        "last_client_told_ms": _spread([one["last_client_told_ms"] for one in told]),
        "unconfirmed": sum(one["unconfirmed"] for one in told),
        "not_cancelled": sum(one["not_cancelled"] for one in told),
        "sequences_left_in_the_engine": sum(one["sequences_left"] for one in told),
        "other_calls": sum(one["others"] for one in told),
        "other_calls_disturbed": sum(one["others_disturbed"] for one in told),
        "bound_ms": MAX_CANCEL_MS,
        "each": told,
    }
    print({name: value for name, value in result.items() if name != "each"}, flush=True)
    return result


class Canceller:
    """A separate process cancels: the one with 1,000 calls is busy with their ends."""

    SOURCE = """
import http.client, json, sys, time
for line in sys.stdin:
    port, run = line.split()
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.connect()
    start = time.perf_counter()
    connection.request("DELETE", f"/v1/runs/{run}?wait_ms=5000")
    report = json.loads(connection.getresponse().read())
    report["answer_ms"] = round((time.perf_counter() - start) * 1000, 2)
    connection.close()
    print(json.dumps(report), flush=True)
"""

    def __init__(self, port: int) -> None:
        self._port = port
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-c", self.SOURCE, stdin=pipe, stdout=pipe)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def cancel(self, run: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{self._port} {run}\n".encode())
        reply: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return reply


async def cancel_run(
    http: aiohttp.ClientSession, canceller: Canceller, pid: int, number: int, running: int, queued: int
) -> dict[str, Any]:
    """Fill the engine and the queue with a run and cancel it."""
    root = f"run-{number}"
    others = [asyncio.create_task(_call(http, f"other-{number}", None, OTHER_TOKENS, "P0")) for _ in range(OTHER_RUNS)]
    calls = [
        asyncio.create_task(_call(http, *_run_of_step(root, step), OUTPUT_TOKENS, "P1"))
        for step in range(running + queued)
    ]
    await _wait_until_full(http, root, running, running + queued)
    start = time.perf_counter()
    began, waited = _scheduled(pid)
    report = await canceller.cancel(root)
    worked, waited = (now - then for now, then in zip(_scheduled(pid), (began, waited), strict=True))
    ends = await asyncio.gather(*calls)
    worked_until_all_told = _scheduled(pid)[0] - began
    beside = await asyncio.gather(*others)
    left = await _still_running(http)
    return {
        "running": report["running"],
        "queued": report["queued"],
        "freed": report["freed"],
        "unconfirmed": report["unconfirmed"],
        "wasted_tokens": report["wasted_tokens"],
        "answer_ms": report["answer_ms"],
        "took_ms": report["took_ms"],
        "gateway_worked_ms": round(worked, 1),
        "gateway_worked_until_all_told_ms": round(worked_until_all_told, 1),
        "gateway_waited_for_a_core_ms": round(waited, 1),
        "last_client_told_ms": round((max(at for at, _, _ in ends) - start) * 1000, 2),
        "not_cancelled": sum(code != "run_cancelled" for _, code, _ in ends),
        "sequences_left": left,
        "others": OTHER_RUNS,
        "others_disturbed": sum(code is not None or tokens != OTHER_TOKENS for _, code, tokens in beside),
    }


def _scheduled(pid: int) -> tuple[float, float]:
    """Milliseconds that the process has run, and that it waited for a core."""
    ran, waited = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
    return int(ran) / 1e6, int(waited) / 1e6


def _run_of_step(root: str, step: int) -> tuple[str, str | None]:
    """The run of a step, and its parent: some in the root, some in its children, most in theirs."""
    if step % 10 == 0:
        return root, None
    child = f"{root}.{step // 10 % CHILDREN}"
    if step % 10 == 1:
        return child, root
    return f"{child}.{step % 10 % GRANDCHILDREN}", child


async def _call(
    http: aiohttp.ClientSession, run: str, parent: str | None, tokens: int, lane: str
) -> tuple[float, str | None, int]:
    """When the call ended, its error, and its output tokens."""
    body = {"model": MODEL, "prompt": [7] * PROMPT_TOKENS, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    headers = {"x-inferry-run-id": run, "x-inferry-lane": lane}
    if parent is not None:
        headers["x-inferry-parent-run-id"] = parent
    async with http.post("/v1/completions", json=body, headers=headers) as answer:
        reply = await answer.json()
        at = time.perf_counter()
    if "error" in reply:
        return at, reply["error"]["code"], 0
    return at, None, reply["usage"]["completion_tokens"]


async def _wait_until_full(http: aiohttp.ClientSession, root: str, running: int, calls: int) -> None:
    """Wait until all calls are admitted and the engine is full."""
    async with asyncio.timeout(120):
        while True:
            async with http.get(f"/v1/runs/{root}", params={"steps": "0"}) as answer:
                page = await answer.json()
            if answer.status == 200 and page["tree"]["in_flight"] == calls:
                break
            await asyncio.sleep(0.05)
        while (await _gauges(http)).get("inferry_worker_running_sequences", 0.0) < running:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _still_running(http: aiohttp.ClientSession) -> float:
    """Running sequences as the engine reports them after the cancellation; reports are periodic."""
    left = 0.0
    for _ in range(40):
        left = (await _gauges(http)).get("inferry_worker_running_sequences", 0.0)
        if not left:
            break
        await asyncio.sleep(0.05)
    return left


async def _gauges(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as answer:
        return parse_metrics(await answer.text())


def _ledger_check(url: str) -> dict[str, int]:
    """Ledger rows of the steps of cancelled runs."""
    with closing(open_queries(url)) as ledger:
        rows = [row for row in ledger.jobs(limit=10**9) if row.error_code == "run_cancelled"]
    never_ran = [row for row in rows if row.queue_ms is None]
    return {
        "cancelled_steps": len(rows),
        "never_ran": len(never_ran),
        "never_ran_and_charged": sum(
            bool(row.prompt_tokens or row.output_tokens or row.gpu_seconds or row.cost_nanos) for row in never_ran
        ),
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "p99": ordered[-(-99 * len(ordered) // 100) - 1],
        "max": ordered[-1],
    }
