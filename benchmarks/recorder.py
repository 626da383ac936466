"""3,000 attempts per second into the recorder beside 300 live calls per second, with SQLite and with PostgreSQL.

Each database has one gateway with a mock worker. Pairs of periods alternate: the live calls alone, and the same calls
while the recorder gets synthetic attempts too. Calls arrive at fixed times whatever the answers do. Afterwards the
gateway stops, and the rows in the database are counted.

Targets: no lost row, and a 99th percentile of the calls' latency within 10 % of that without the load, as the median
over the pairs.
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
from pathlib import Path
from typing import Any

import aiohttp
from sqlalchemy import func, select

from benchmarks.serving import free_port, wait_for
from inferry.cli.checkout import ROOT
from inferry.ledger.schema import attempts
from inferry.ledger.stores.opening import connect

ATTEMPTS_PER_S = 3000.0
CALLS_PER_S = 300.0
SECONDS = 60.0
PAIRS = 5
WARM_UP_S = 3.0
CALL = {"model": "m", "messages": [{"role": "user", "content": "a short question"}], "max_tokens": 8}


def measure(seconds: float = SECONDS, pairs: int = PAIRS) -> dict[str, Any]:
    result: dict[str, Any] = {
        "attempts_per_s": ATTEMPTS_PER_S,
        "calls_per_s": CALLS_PER_S,
        "seconds_per_period": seconds,
        "pairs": pairs,
    }
    with tempfile.TemporaryDirectory() as name:
        result["sqlite"] = _measured(f"sqlite:///{Path(name) / 'ledger.db'}", seconds, pairs)
    with _postgres() as url:
        result["postgresql"] = _measured(url, seconds, pairs)
    for name in ("sqlite", "postgresql"):
        found = result[name]
        lost, rows, ratio = found["lost_rows"], found["expected_rows"], found["p99_ratio"]
        print(f"{name}: lost {lost} of {rows} rows; p99 beside the load over p99 alone: {ratio:.3f}", flush=True)
    return result


@contextmanager
def _postgres() -> Iterator[str]:
    """A server with its default settings, so that a commit is on the disk."""
    directory = tempfile.mkdtemp(prefix="inferry-pg-", dir="/tmp")
    script = ROOT / "scripts" / "postgres.sh"
    Path(directory).chmod(0o755)
    started = subprocess.run([script, "start", directory], stdout=subprocess.PIPE, text=True, check=True)
    try:
        yield started.stdout.strip()
    finally:
        subprocess.run([script, "stop", directory, "immediate"], check=False)
        subprocess.run(["rm", "-rf", directory, f"{directory}.log"], check=False)


def _measured(ledger: str, seconds: float, pairs: int) -> dict[str, Any]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.recorder_gateway", str(port), ledger]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdin is not None
        wait_for(f"http://127.0.0.1:{port}/ready", gateway)  # type: ignore[arg-type]
        periods = asyncio.run(_periods(port, gateway, seconds, pairs))
        output, _ = gateway.communicate(timeout=300)
    recorder = json.loads(output.splitlines()[-1])
    calls = sum(len(period["latencies_ms"]) for pair in periods for period in pair.values())
    expected = round(CALLS_PER_S * WARM_UP_S) + calls + round(ATTEMPTS_PER_S * seconds) * pairs
    rows = _count_rows(ledger)
    shown = [{arm: _spread(period["latencies_ms"]) for arm, period in pair.items()} for pair in periods]
    ratios = [pair["beside"]["p99_ms"] / pair["alone"]["p99_ms"] for pair in shown]
    return {
        "rows": rows,
        "expected_rows": expected,
        "lost_rows": expected - rows,
        "recorder": recorder,
        "failed_calls": sum(period["failed"] for pair in periods for period in pair.values()),
        "p99_ratio": statistics.median(ratios),
        "p99_ratios": ratios,
        "pairs": shown,
    }


async def _periods(port: int, gateway: "subprocess.Popen[str]", seconds: float, pairs: int) -> list[dict[str, Any]]:
    found = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0)) as http:
        await _calls(http, WARM_UP_S)
        for number in range(pairs):
            pair = {}
            for arm in ("alone", "beside") if number % 2 == 0 else ("beside", "alone"):
                if arm == "beside":
                    assert gateway.stdin is not None
                    gateway.stdin.write(f"{ATTEMPTS_PER_S} {seconds}\n")
                    gateway.stdin.flush()
                pair[arm] = await _calls(http, seconds)
                await asyncio.sleep(2.0)  # what is buffered is written before the next period
            found.append(pair)
            print({arm: _spread(period["latencies_ms"]) for arm, period in pair.items()}, flush=True)
    return found


async def _calls(http: aiohttp.ClientSession, seconds: float) -> dict[str, Any]:
    """Calls at fixed times. The latency of a call counts from the time at which it was due."""
    latencies: list[float] = []
    failed = 0

    async def call(due: float) -> None:
        nonlocal failed
        async with http.post("/v1/chat/completions", json=CALL) as response:
            await response.read()
            failed += response.status != 200
        latencies.append(1000 * (time.monotonic() - due))

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(round(CALLS_PER_S * seconds)):
            due = began + number / CALLS_PER_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.create_task(call(due))
    return {"latencies_ms": latencies, "failed": failed}


def _spread(latencies_ms: list[float]) -> dict[str, float]:
    ordered = sorted(latencies_ms)
    at = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    return {name: round(ordered[int(part * (len(ordered) - 1))], 3) for name, part in at.items()}


def _count_rows(ledger: str) -> int:
    connector = connect(ledger)
    with connector.reading() as connection:
        rows = int(connection.execute(select(func.count()).select_from(attempts)).scalar_one())
    connector.close()
    return rows
