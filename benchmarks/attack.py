"""The effect of attacking clients without a key: latency of `/health` on other connections, before and during it.

Fifty connections at a time send floods of trailers, header fields and pipelined calls, and bodies that never end. The
gateway has one core; attackers and the client of `/health` share the other, so part of the latency is the client's own.
Requests are timed from when they were due, not from the previous answer.
"""

import asyncio
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.attackers import ATTACKS
from benchmarks.serving import (
    cpu_seconds,
    free_port,
    resident_bytes,
    run_gateway_with_key,
    run_process,
    wait_for,
    wait_until_idle,
)

CONNECTIONS = 50
SECONDS = 8.0
PROBE_INTERVAL_S = 0.01
PROBES = 4
GATEWAY_CORE, LOAD_CORE = 0, 1
MAX_P99_MS = 50.0
MAX_GROWTH_MB = 50.0
_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def measure() -> dict[str, Any]:
    with ExitStack() as stack:
        source_port = free_port()
        source = stack.enter_context(
            run_process([sys.executable, "-m", "benchmarks.stream_source", str(source_port)], core=LOAD_CORE)
        )
        wait_for(f"http://127.0.0.1:{source_port}/v1/models", source)
        worker = {"name": "source", "kind": "vllm", "url": f"http://127.0.0.1:{source_port}", "models": ["m"]}
        port, gateway, _ = stack.enter_context(run_gateway_with_key({"workers": [worker]}, "acme", core=GATEWAY_CORE))
        health = asyncio.run(_health(port, 2.0, gateway.pid))  # objects that are made once and kept
        before = resident_bytes(gateway.pid)
        attacks = {}
        for kind in ATTACKS:
            attacks[kind] = one = _measure_attack(port, kind, gateway.pid)
            print(f"{kind}: /health p99 {one['attacked']['p99_ms']} ms, alone {one['alone']['p99_ms']} ms", flush=True)
            print(f"  {one['attackers']}", flush=True)
        after = resident_bytes(gateway.pid)
    worst = max(one["attacked"]["p99_ms"] for one in attacks.values())
    grown = max(one["attacked"]["peak_rss_MB"] for one in attacks.values()) - before / 1e6
    return {
        "connections": CONNECTIONS,
        "health_first": health,
        "attacks": attacks,
        "rss_MB": {"before": round(before / 1e6, 1), "after": round(after / 1e6, 1)},
        "p99_ms": {"is": worst, "target": f"< {MAX_P99_MS:g} under every attack", "met": worst < MAX_P99_MS},
        "grown_MB": {"is": round(grown, 1), "target": f"< {MAX_GROWTH_MB:g} at the peak", "met": grown < MAX_GROWTH_MB},
    }


def _measure_attack(port: int, kind: str, pid: int) -> dict[str, Any]:
    alone = asyncio.run(_health(port, SECONDS / 2, pid))
    command = [sys.executable, "-m", "benchmarks.attackers", str(port), kind, str(CONNECTIONS), str(SECONDS)]
    with subprocess.Popen(["taskset", "-c", str(LOAD_CORE), *command], stdout=subprocess.PIPE) as attackers:
        time.sleep(0.5)
        attacked = asyncio.run(_health(port, SECONDS, pid))
        report, _ = attackers.communicate()
    wait_until_idle(pid)
    ratio = round(attacked["p99_ms"] / alone["p99_ms"], 1) if alone["p99_ms"] else None
    return {"alone": alone, "attacked": attacked, "ratio_p99": ratio, "attackers": json.loads(report)}


async def _health(port: int, seconds: float, pid: int) -> dict[str, Any]:
    """Latencies of `/health`, and CPU and memory of the server meanwhile."""
    latencies: list[float] = []
    peak = resident_bytes(pid)
    began, busy = time.monotonic(), cpu_seconds(pid)

    async def probe(offset: float) -> None:
        nonlocal peak
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        due = began + offset
        while due < began + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(_HEALTH)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            latencies.append(time.monotonic() - due)
            peak = max(peak, resident_bytes(pid))
            due += PROBE_INTERVAL_S * PROBES
        writer.close()

    await asyncio.gather(*(probe(PROBE_INTERVAL_S * number) for number in range(PROBES)))
    latencies.sort()
    at = {f"p{share:g}_ms": round(1000 * latencies[int(len(latencies) * share / 100)], 2) for share in (50, 99)}
    return {
        **at,
        "max_ms": round(1000 * latencies[-1], 2),
        "requests": len(latencies),
        "peak_rss_MB": round(peak / 1e6, 1),
        "cpu_share": round((cpu_seconds(pid) - busy) / (time.monotonic() - began), 2),
    }
