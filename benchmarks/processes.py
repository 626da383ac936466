"""Several gateway processes on one port: requests per second and events per second of 1, 2, 4 and 8 processes, and the
latency that the way over the owner adds.

The gateway has one core for each of its processes. Backends and load generators (`benchmarks.tools`) have cores of
their own, and there are several of both, so that neither limits the gateway. Needs 16 cores for 8 processes and a C
compiler; PROCESSES names other numbers of processes. With too few cores all programs share them, and the figures say
nothing.
"""

import http.client
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.path import CALL, write_bodies
from benchmarks.serving import free_port, run_gateway, run_process, wait_for
from benchmarks.tools import Tools, build_tools

PROCESSES = (1, 2, 4, 8)
LOADERS = 4
BACKENDS = 4
CONNECTIONS_PER_PROCESS = 32
SECONDS = 4.0
ROUNDS = 3
HOP_CONNECTIONS = 12
HOP_REQUESTS = 400
HOP_TARGET_MS = 0.3


def measure() -> dict[str, Any]:
    numbers = [int(number) for number in os.environ.get("PROCESSES", "").split(",") if number] or list(PROCESSES)
    with tempfile.TemporaryDirectory() as name:
        tools = build_tools(Path(name))
        bodies = write_bodies(tools.directory)
        rates = {number: _rates(tools, bodies, number) for number in numbers}
        hop = _hop(tools)
    first = rates[numbers[0]]
    curve = {
        number: {case: round(rates[number][case]["rate"] / first[case]["rate"], 2) for case in first}
        for number in numbers
    }
    print(f"relative to {numbers[0]}: {curve}", flush=True)
    return {
        "cores": os.cpu_count(),
        "rates": rates,
        "relative": curve,
        "hop": hop,
        "targets": {"hop_p50_ms": {"is": hop["added_p50_ms"], "target": f"<= {HOP_TARGET_MS}"}},
    }


def _rates(tools: Tools, bodies: dict[str, Path], processes: int) -> dict[str, Any]:
    """Requests (whole answers) and events (streams) per second at saturation: the median of the rounds."""
    gateway_cores, other_cores = _cores(processes)
    with (
        _backends(tools, other_cores) as ports,
        run_gateway(_config(ports), core=gateway_cores, processes=processes) as (port, _),
    ):
        _wait_for_all(port, processes)
        found: dict[str, Any] = {}
        for case, unit in (("whole", "rps"), ("stream", "events_per_s")):
            runs = [_load(tools, port, bodies[case], processes, other_cores) for _ in range(ROUNDS + 1)][1:]
            found[case] = {
                "rate": round(statistics.median(sum(one[unit] for one in run) for run in runs)),
                "requests_per_s": round(statistics.median(sum(one["rps"] for one in run) for run in runs)),
                "p50_ms": statistics.median(one["p50_ms"] for run in runs for one in run),
                "p99_ms": statistics.median(one["p99_ms"] for run in runs for one in run),
                "errors": sum(one["errors"] + one["non200"] for run in runs for one in run),
            }
            print(f"{processes} processes, {case}: {found[case]}", flush=True)
    return found


def _load(tools: Tools, port: int, body: Path, processes: int, cores: str) -> list[dict[str, float]]:
    """All load generators at once."""
    connections = max(1, CONNECTIONS_PER_PROCESS * processes // LOADERS)
    command = [str(tools.http_load), str(port), "/v1/chat/completions", str(connections), str(SECONDS), str(body)]
    running = [
        subprocess.Popen(["taskset", "-c", cores, *command], stdout=subprocess.PIPE, text=True) for _ in range(LOADERS)
    ]
    return [json.loads(one.communicate(timeout=60)[0]) for one in running]


def _cores(processes: int) -> tuple[str, str]:
    """Cores of the gateway and of everything else; all cores for both where there are too few."""
    total = os.cpu_count() or 1
    if total < processes + 2:
        return f"0-{total - 1}", f"0-{total - 1}"
    return f"0-{processes - 1}", f"{processes}-{total - 1}"


@contextmanager
def _backends(tools: Tools, cores: str) -> Iterator[list[int]]:
    """Servers that compute nothing."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(BACKENDS)]
        for port in ports:
            mock = stack.enter_context(run_process([str(tools.mock_llm), str(port), "16", "0"], core=cores))
            wait_for(f"http://127.0.0.1:{port}/v1/models", mock)
        yield ports


def _config(ports: list[int]) -> dict[str, Any]:
    workers = [
        {
            "name": f"mock-{port}",
            "kind": "vllm",
            "url": f"http://127.0.0.1:{port}",
            "models": ["m"],
            "max_sequences": 4096,
        }
        for port in ports
    ]
    # Every call is identical here, and each has to run.
    return {"workers": workers, "single_flight": {"identical": False}}


class _Client:
    """One connection, and the process that serves it: the first part of its request ids."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._body = json.dumps(CALL)
        self.process = self.call()

    def call(self) -> str:
        self._connection.request("POST", "/v1/chat/completions", self._body)
        response = self._connection.getresponse()
        response.read()
        return (response.headers["x-request-id"] or "").rpartition("-")[0]

    def local_port(self) -> int:
        return int(self._connection.sock.getsockname()[1])

    def close(self) -> None:
        self._connection.close()


def _wait_for_all(port: int, processes: int) -> None:
    """Wait until every process has answered a call."""
    found: set[str] = set()
    end = time.monotonic() + 120
    while len(found) < processes:
        client = _Client(port)
        found.add(client.process)
        client.close()
        if time.monotonic() > end:
            raise RuntimeError(f"only {len(found)} of {processes} processes answer")


def _hop(tools: Tools) -> dict[str, Any]:
    """The time of a call through an ingress process, less that of one at the owner, one call at a time."""
    gateway_cores, other_cores = _cores(2)
    with (
        _backends(tools, other_cores) as ports,
        run_gateway(_config(ports), core=gateway_cores, processes=2) as (port, supervisor),
    ):
        _wait_for_all(port, 2)
        owner = int(Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()[0])
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(HOP_CONNECTIONS):
            client = _Client(port)
            is_owner = _serves(owner, client.local_port())
            for _ in range(HOP_REQUESTS):
                begun = time.perf_counter()
                client.call()
                times[is_owner].append(time.perf_counter() - begun)
            client.close()
    p50 = {name: round(1000 * statistics.median(times[key]), 3) for key, name in ((True, "owner"), (False, "ingress"))}
    found = {
        **p50,
        "added_p50_ms": round(p50["ingress"] - p50["owner"], 3),
        "calls": [len(one) for one in times.values()],
    }
    print(f"hop: {found}", flush=True)
    return found


def _serves(pid: int, client_port: int) -> bool:
    """Whether the process has the other end of the client's connection."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if int(row[2].rpartition(":")[2], 16) == client_port}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(descriptor) in inodes:
                return True
        except OSError:
            continue
    return False
