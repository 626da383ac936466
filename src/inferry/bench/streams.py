"""Five thousand open streams through one gateway process, and one reader among them that hardly reads.

Shown: what a stream takes of memory, that all of it is given back, and that the gaps between everybody else's events
are the same with the slow reader and without. The same readers on the server itself, without a gateway, say how much of
the gaps is not the gateway's. The gateway has one core; server and readers share the other.
"""

import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from inferry.bench.serving import a_gateway, a_process, free_port, resident_bytes, wait_for, wait_until_idle

STREAMS = 5000
TURNS = 6
GATEWAY_CORE, LOAD_CORE = 0, 1
AFTER_S = 3.0


def measure() -> dict[str, Any]:
    with ExitStack() as stack:
        source_port = free_port()
        source = stack.enter_context(
            a_process([sys.executable, "-m", "inferry.bench.stream_source", str(source_port)], core=LOAD_CORE)
        )
        wait_for(f"http://127.0.0.1:{source_port}/v1/models", source)
        worker = {"name": "source", "kind": "vllm", "url": f"http://127.0.0.1:{source_port}", "models": ["m"]}
        port, gateway = stack.enter_context(
            a_gateway({"workers": [worker | {"max_sequences": 2 * STREAMS, "room": "fixed"}]}, core=GATEWAY_CORE)
        )
        direct = _read(source_port, STREAMS, source.pid, TURNS)
        _read(port, 100, gateway.pid, turns=0)  # what is made once and kept
        wait_until_idle(gateway.pid)
        through = _read(port, STREAMS, gateway.pid, TURNS)
        time.sleep(AFTER_S)
        wait_until_idle(gateway.pid)
        through["rss_after"] = resident_bytes(gateway.pid)
        again = _read(port, STREAMS, gateway.pid, turns=0)
    grown = through["rss_open"] - through["rss_before"]
    result = {
        "streams": STREAMS,
        "kB_per_stream": round(grown / STREAMS / 1000, 2),
        "rss_MB": {
            "before": _mb(through["rss_before"]),
            "all_open": _mb(through["rss_open"]),
            "beside_slow_reader": [_mb(one["rss"]) for one in through["slow_readers"]],
            "after": _mb(through["rss_after"]),
            "all_open_again": _mb(again["rss_open"]),
        },
        "gaps_ms": {
            "gateway": _medians(through),
            "no_gateway": _medians(direct),
        },
        "through": through,
        "again": again,
        "direct": direct,
    }
    print(f"{STREAMS} streams: {result['kB_per_stream']} kB each, RSS {result['rss_MB']}", flush=True)
    print(f"gaps in ms: {result['gaps_ms']}; {through['streams_lost']} streams lost", flush=True)
    return result


def _read(port: int, streams: int, pid: int, turns: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "inferry.bench.stream_readers", str(port), str(streams), str(pid)]
    command.append(str(turns))
    done = subprocess.run(["taskset", "-c", str(LOAD_CORE), *command], stdout=subprocess.PIPE, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _medians(said: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Over the turns."""
    return {
        when: {name: statistics.median(turn[name] for turn in turns) for name in ("p50", "p99", "p999")}
        for when, turns in said["gaps_ms"].items()
    }


def _mb(size: int) -> float:
    return round(size / 1e6, 1)


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
