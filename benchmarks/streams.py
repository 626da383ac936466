"""5,000 open streams through one gateway process, one of them with a slow reader.

Measured: memory per stream, that all of it is freed, and the effect of a slow reader on the event intervals of the
other streams. The effect is a paired difference of windows in one run, with a confidence interval: a slow reader of a
flood against a fast one, and, for the noise of the measurement, the fast reader against none. The same readers directly
on the server show the part that is not the gateway's. The gateway has one core; server and readers share the other.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from benchmarks.paired import paired
from benchmarks.serving import free_port, resident_bytes, run_gateway, run_process, wait_for, wait_until_idle

STREAMS = 5000
BLOCKS = 12
DIRECT_BLOCKS = 2
GATEWAY_CORE, LOAD_CORE = 0, 1
AFTER_S = 3.0
FIGURES = ("p50", "p99", "mean_late", "server_ran")
"""Figures of a window, in milliseconds."""
MEDIANS = (*FIGURES, "p999", "server_had_no_core")
MAX_DELAY_MS = 5.0
"""Above the machine's noise in such a window, below what is noticeable between tokens."""


def measure() -> dict[str, Any]:
    with ExitStack() as stack:
        source_port, source = stack.enter_context(run_source(LOAD_CORE))
        port, gateway = stack.enter_context(run_gateway(config_for_source(source_port), core=GATEWAY_CORE))
        direct = read(source_port, STREAMS, source.pid, DIRECT_BLOCKS)
        warm_up(port, gateway.pid)
        through = read(port, STREAMS, gateway.pid, BLOCKS)
        time.sleep(AFTER_S)
        wait_until_idle(gateway.pid)
        through["rss_after"] = resident_bytes(gateway.pid)
        again = read(port, STREAMS, gateway.pid, blocks=0)
    grown = through["rss_open"] - through["rss_before"]
    slow = _differences(through, "slow_reader", "reads_all")
    result = {
        "streams": STREAMS,
        "kB_per_stream": round(grown / STREAMS / 1000, 2),
        "rss_MB": {
            "before": _mb(through["rss_before"]),
            "all_open": _mb(through["rss_open"]),
            "beside_slow_reader": [_mb(block["slow_reader"]["rss"]) for block in through["blocks"]],
            "after": _mb(through["rss_after"]),
            "all_open_again": _mb(again["rss_open"]),
        },
        "itl_ms": {"gateway": _medians(through), "no_gateway": _medians(direct)},
        "slow_reader_adds_ms": slow,
        "flood_adds_ms": _differences(through, "reads_all", "alone"),
        "delays_no_other_stream": {
            "is": slow["p99"]["high"],
            "target": f"p99, upper end of the interval <= {MAX_DELAY_MS:g}",
            "met": slow["p99"]["high"] <= MAX_DELAY_MS,
        },
        "through": through,
        "again": again,
        "direct": direct,
    }
    print(f"{STREAMS} streams: {result['kB_per_stream']} kB each, RSS {result['rss_MB']}", flush=True)
    print(f"inter-token latencies in ms: {result['itl_ms']}; {through['streams_lost']} streams lost", flush=True)
    for name in ("slow_reader_adds_ms", "flood_adds_ms"):
        print(f"{name}: {_line(result[name])}", flush=True)
    return result


@contextmanager
def run_source(core: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The server of the streams: its port and its process."""
    port = free_port()
    with run_process([sys.executable, "-m", "benchmarks.stream_source", str(port)], core=core) as source:
        wait_for(f"http://127.0.0.1:{port}/v1/models", source)
        yield port, source


def config_for_source(port: int) -> dict[str, Any]:
    worker = {"name": "source", "kind": "vllm", "url": f"http://127.0.0.1:{port}", "models": ["m"]}
    return {"workers": [worker | {"max_sequences": 2 * STREAMS, "capacity": "fixed"}]}


def warm_up(port: int, pid: int, core: int = LOAD_CORE) -> None:
    """Let the gateway make the objects that are made once and kept."""
    read(port, 100, pid, blocks=0, core=core)
    wait_until_idle(pid)


def read(port: int, streams: int, pid: int, blocks: int, core: int = LOAD_CORE) -> dict[str, Any]:
    """The report of `stream_readers`."""
    command = [sys.executable, "-m", "benchmarks.stream_readers", str(port), str(streams), str(pid)]
    command.append(str(blocks))
    done = subprocess.run(["taskset", "-c", str(core), *command], stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _medians(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Medians over the blocks."""
    return {
        kind: {name: statistics.median(block[kind][name] for block in report["blocks"]) for name in MEDIANS}
        for kind in report["blocks"][0]
    }


def _differences(report: dict[str, Any], kind: str, other: str) -> dict[str, dict[str, float]]:
    """Window against window of the same block."""
    blocks = report["blocks"]
    found = {
        name: paired([block[kind][name] for block in blocks], [block[other][name] for block in blocks])
        for name in FIGURES
    }
    return {
        name: {what: round(figure, 3) for what, figure in msgspec.structs.asdict(one).items()}
        for name, one in found.items()
    }


def _line(differences: dict[str, dict[str, float]]) -> str:
    return ", ".join(
        f"{name} {one['median']:+.2f} [{one['low']:+.2f}, {one['high']:+.2f}]" for name, one in differences.items()
    )


def _mb(size: int) -> float:
    return round(size / 1e6, 1)


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
