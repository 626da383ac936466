"""3,000 attempts per second into the recorder beside 300 live calls per second, with SQLite and with PostgreSQL.

Each database has one gateway with a mock worker. Periods alternate: the live calls alone, the same calls while the
recorder gets synthetic attempts too (`beside`), and while the same attempts are thrown away instead (`discarded`): what
`beside` has more than that is the recorder. Calls arrive at fixed times whatever the answers do. Afterwards the gateway
stops, and the rows in the database are counted. Then PostgreSQL is stopped in the middle of both loads of a minute.

Targets: no lost row, and a 99th percentile of the calls' latency within 10 % of that without the load, as the median
over the pairs. While PostgreSQL is stopped no call fails, and no row is lost afterwards.

Five pairs take eleven minutes. PERIOD_S sets the length of a period: with 60 they take 32.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from sqlalchemy import func, select

from benchmarks.postgres import PostgresServer, run_postgres
from benchmarks.serving import free_port, wait_for
from inferry.ledger.schema import attempts
from inferry.ledger.stores.opening import connect

ATTEMPTS_PER_S = 3000.0
CALLS_PER_S = 300.0
SECONDS = float(os.environ.get("PERIOD_S", "18"))
PAIRS = 5
WARM_UP_S = 3.0
SETTLING_S = 1.0
"""What is buffered is written before the next period."""
STOPPED_S = 30.0
ARMS = ("alone", "beside", "discarded")
T = TypeVar("T")
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
    with run_postgres() as server:
        result["postgresql"] = _measured(server.url, seconds, pairs)
        result["postgresql_stopped"] = stopped = _stopped(server, 2 * STOPPED_S if seconds == SECONDS else seconds)
    for name in ("sqlite", "postgresql"):
        found = result[name]
        lost, rows, ratio = found["lost_rows"], found["expected_rows"], found["p99_ratio"]
        print(f"{name}: lost {lost} of {rows} rows; p99 beside the load over p99 alone: {ratio:.3f}", flush=True)
        print(f"{name}: the same over p99 beside discarded attempts: {found['p99_ratio_to_discarded']:.3f}", flush=True)
    lost, rows, failed = stopped["lost_rows"], stopped["expected_rows"], stopped["failed_calls"]
    print(f"postgresql stopped for {STOPPED_S:.0f} s: lost {lost} of {rows} rows; {failed} failed calls", flush=True)
    return result


def _served(ledger: str, play: Callable[[int, "subprocess.Popen[str]"], Coroutine[Any, Any, T]]) -> tuple[T, Any]:
    """The result of `play` with a gateway on a port, and the recorder's counters after the gateway has stopped."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.recorder_gateway", str(port), ledger]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gateway:
        wait_for(f"http://127.0.0.1:{port}/ready", gateway)  # type: ignore[arg-type]
        found = asyncio.run(play(port, gateway))
        output, _ = gateway.communicate(timeout=300)
    return found, json.loads(output.splitlines()[-1])


def _stopped(server: PostgresServer, seconds: float) -> dict[str, Any]:
    """Both loads for `seconds`, in the middle of which the server is stopped."""
    before = _count_rows(server.url)
    stopped_s = min(STOPPED_S, seconds / 2)

    async def play(port: int, gateway: "subprocess.Popen[str]") -> dict[str, Any]:
        async with _client(port) as http:
            await _hand_over(gateway, "beside", seconds)
            calls = asyncio.create_task(_calls(http, seconds))
            await asyncio.sleep((seconds - stopped_s) / 2)
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(stopped_s)
            await asyncio.to_thread(server.start)
            return await calls

    period, recorder = _served(server.url, play)
    expected = len(period["latencies_ms"]) + round(ATTEMPTS_PER_S * seconds)
    return {
        "stopped_s": stopped_s,
        "expected_rows": expected,
        "lost_rows": expected - (_count_rows(server.url) - before),
        "recorder": recorder,
        "failed_calls": period["failed"],
        **_spread(period["latencies_ms"]),
    }


def _measured(ledger: str, seconds: float, pairs: int) -> dict[str, Any]:
    periods, recorder = _served(ledger, partial(_periods, seconds=seconds, pairs=pairs))
    calls = sum(len(period["latencies_ms"]) for pair in periods for period in pair.values())
    expected = round(CALLS_PER_S * WARM_UP_S) + calls + round(ATTEMPTS_PER_S * seconds) * pairs
    rows = _count_rows(ledger)
    shown = [{arm: _spread(period["latencies_ms"]) for arm, period in pair.items()} for pair in periods]
    ratios, to_discarded = (
        [pair["beside"]["p99_ms"] / pair[arm]["p99_ms"] for pair in shown] for arm in ("alone", "discarded")
    )
    return {
        "rows": rows,
        "expected_rows": expected,
        "lost_rows": expected - rows,
        "recorder": recorder,
        "failed_calls": sum(period["failed"] for pair in periods for period in pair.values()),
        "p99_ratio": statistics.median(ratios),
        "p99_ratios": ratios,
        "p99_ratio_to_discarded": statistics.median(to_discarded),
        "p99_ratios_to_discarded": to_discarded,
        "pairs": shown,
    }


async def _periods(port: int, gateway: "subprocess.Popen[str]", seconds: float, pairs: int) -> list[dict[str, Any]]:
    found = []
    async with _client(port) as http:
        await _calls(http, WARM_UP_S)
        for number in range(pairs):
            pair = {}
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                if arm != "alone":
                    await _hand_over(gateway, arm, seconds)
                pair[arm] = await _calls(http, seconds)
                await asyncio.sleep(SETTLING_S)
            found.append(pair)
            print({arm: _spread(period["latencies_ms"]) for arm, period in pair.items()}, flush=True)
    return found


def _client(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0))


async def _hand_over(gateway: "subprocess.Popen[str]", arm: str, seconds: float) -> None:
    """Begin to hand over attempts, once they are made."""
    assert gateway.stdin is not None
    assert gateway.stdout is not None
    gateway.stdin.write(f"{arm} {ATTEMPTS_PER_S} {seconds}\n")
    gateway.stdin.flush()
    line = await asyncio.to_thread(gateway.stdout.readline)
    if line != "ready\n":
        raise RuntimeError(f"the gateway said {line!r}")
    gateway.stdin.write("go\n")
    gateway.stdin.flush()


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
