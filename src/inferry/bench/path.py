"""The cost of the path: the gateway with everything on, beside a bare pass-through, in one run.

Both stand before the same instant backend and get the same closed-loop load, in alternating rounds; the gateway under
test has one core, backend and load share the other. The work is not the same: the gateway streams every call upstream,
also where the client wants a whole answer, and the backend then sends eighteen events instead of one body. Needs the
yardsticks `mockllm.c` and `llmload.c`, found in the directory RULER names (default
../shared/ruler).
"""

import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from inferry.bench.serving import a_gateway, a_process, cpu_seconds, free_port, wait_for

ROUNDS = 11
SECONDS = 1.5
GAP_US = 20_000
STREAMS = 512
GATEWAY_CORE, LOAD_CORE = 0, 1

CALL = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are the triage agent of a support desk. Classify the ticket in one word."},
        {"role": "user", "content": "I was charged twice for my March invoice and have not been refunded. Help."},
    ],
    "max_tokens": 16,
    "temperature": 0,
}


class Arm:
    """One thing under test: where it listens and which process it is."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes]) -> None:
        self.name, self.port, self.pid = name, port, process.pid


def measure() -> dict[str, Any]:
    ruler = Path(os.environ.get("RULER", "../shared/ruler"))
    if not (ruler / "mockllm.c").is_file():
        raise SystemExit(f"no mockllm.c in {ruler}: set RULER to the directory that has the yardsticks")
    with tempfile.TemporaryDirectory() as name:
        tools = Path(name)
        for tool in ("mockllm", "llmload"):
            subprocess.run(["gcc", "-O2", "-w", "-o", tools / tool, ruler / f"{tool}.c"], check=True)
        bodies = _bodies(tools)
        return {"instant": _instant(tools, bodies), "paced": _paced(tools, bodies)}


def _bodies(directory: Path) -> dict[str, Path]:
    long = CALL | {"messages": [{"role": "user", "content": "The invoice was charged twice. " * 13_000}]}
    bodies = {"whole": CALL, "stream": CALL | {"stream": True}, "long": long}
    for name, body in bodies.items():
        (directory / name).write_text(json.dumps(body, separators=(",", ":")))
    return {name: directory / name for name in bodies}


def _instant(tools: Path, bodies: dict[str, Path]) -> dict[str, Any]:
    """An instant backend: what a call costs."""
    cases = {"c1": ("whole", 1), "c32": ("whole", 32), "c32_stream": ("stream", 32), "c8_400kB": ("long", 8)}
    with _arms(tools, gap_us=0) as arms:
        found = _rounds(arms, {case: _load(tools, bodies[body], count) for case, (body, count) in cases.items()})
        profile = _profile(next(arm for arm in arms if arm.name == "inferry"), tools, bodies["whole"], 32)
    out: dict[str, Any] = {"profile_c32": profile}
    for case in cases:
        by_arm = {arm.name: found[arm.name, case] for arm in arms}
        out[case] = {
            name: {
                "requests_per_s": _median(runs, "rps"),
                "events_per_s": _median(runs, "events_per_s"),
                "p50_ms": _median(runs, "p50_ms"),
                "p99_ms": _median(runs, "p99_ms"),
                "cpu_us_per_request": statistics.median(1e6 * run["cpu_s"] / max(1, run["n"]) for run in runs),
                "errors": sum(run["errors"] + run["non200"] for run in runs),
            }
            for name, runs in by_arm.items()
        }
        pairs = list(zip(by_arm["inferry"], by_arm["bare"], strict=True))
        out[case]["requests_ratio"] = round(statistics.median(a["rps"] / b["rps"] for a, b in pairs), 3)
        out[case]["requests_ratio_of_best"] = round(
            max(a["rps"] for a, _ in pairs) / max(b["rps"] for _, b in pairs), 3
        )
        print(f"{case}: " + _line(out[case]), flush=True)
    return out


def _paced(tools: Path, bodies: dict[str, Path]) -> dict[str, Any]:
    """512 streams with a token every 20 ms: what an event costs."""
    with _arms(tools, gap_us=GAP_US) as arms:
        found = _rounds(arms, {"streams": _load(tools, bodies["stream"], STREAMS, seconds=6.0)})
        profile = _profile(next(arm for arm in arms if arm.name == "inferry"), tools, bodies["stream"], STREAMS)
    out: dict[str, Any] = {}
    costs: dict[str, list[float]] = {}
    for arm in arms:
        runs = found[arm.name, "streams"]
        costs[arm.name] = [1e6 * run["cpu_s"] / max(1.0, run["events_per_s"] * run["wall_s"]) for run in runs]
        out[arm.name] = {
            "events_per_s": _median(runs, "events_per_s"),
            "cpu_us_per_event": round(statistics.median(costs[arm.name]), 2),
            "ttft_p99_ms": _median(runs, "ttft_p99_ms"),
            "errors": sum(run["errors"] + run["non200"] for run in runs),
        }
        print(f"512 streams, {arm.name}: {out[arm.name]}", flush=True)
    out["cpu_per_event_ratio"] = round(
        statistics.median(a / b for a, b in zip(costs["inferry"], costs["bare"], strict=True)), 3
    )
    out["profile"] = profile
    print(f"512 streams: {out['cpu_per_event_ratio']}x the CPU per event of the bare pass-through", flush=True)
    for where, share in list(profile["by_room"].items())[:12]:
        print(f"  {share:5.1f} %  {where}")
    return out


@contextmanager
def _arms(tools: Path, gap_us: int) -> Iterator[list[Arm]]:
    """The backend, and both gateways before it."""
    with ExitStack() as stack:
        backend = free_port()
        command = [str(tools / "mockllm"), str(backend), "16", str(gap_us)]
        mock = stack.enter_context(a_process(command, core=LOAD_CORE))
        wait_for(f"http://127.0.0.1:{backend}/v1/models", mock)
        bare_port = free_port()
        command = [sys.executable, "-m", "inferry.bench.passthrough", str(bare_port), str(backend)]
        bare = stack.enter_context(a_process(command, core=GATEWAY_CORE))
        wait_for(f"http://127.0.0.1:{bare_port}/v1/models", bare)
        worker = {"name": "mock", "kind": "vllm", "url": f"http://127.0.0.1:{backend}", "models": ["m"]}
        port, process = stack.enter_context(
            a_gateway({"workers": [worker | {"max_sequences": 4096}]}, core=GATEWAY_CORE)
        )
        yield [Arm("bare", bare_port, bare), Arm("inferry", port, process)]


def _load(tools: Path, body: Path, connections: int, seconds: float = SECONDS) -> Callable[[Arm], dict[str, float]]:
    def load(arm: Arm) -> dict[str, float]:
        before, begin = cpu_seconds(arm.pid), time.monotonic()
        command = [
            str(tools / "llmload"),
            str(arm.port),
            "/v1/chat/completions",
            str(connections),
            str(seconds),
            str(body),
        ]
        done = subprocess.run(["taskset", "-c", str(LOAD_CORE), *command], capture_output=True, text=True, check=True)
        wall = time.monotonic() - begin
        said: dict[str, float] = json.loads(done.stdout)
        return said | {"cpu_s": cpu_seconds(arm.pid) - before, "wall_s": wall}

    return load


def _rounds(
    arms: list[Arm], loads: dict[str, Callable[[Arm], dict[str, float]]]
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Alternate between the arms, so that the machine's moods hit both alike; the first round only warms up."""
    found: dict[tuple[str, str], list[dict[str, float]]] = collections.defaultdict(list)
    for round_number in range(ROUNDS + 1):
        for case, load in loads.items():
            for arm in arms if round_number % 2 else reversed(arms):
                run = load(arm)
                if round_number:
                    found[arm.name, case].append(run)
    return found


def _profile(arm: Arm, tools: Path, body: Path, connections: int) -> dict[str, Any]:
    """Where the gateway's time goes: by function and by room, in percent of samples."""
    stacks = tools / "stacks"
    load = [str(tools / "llmload"), str(arm.port), "/v1/chat/completions", str(connections), "8", str(body)]
    spy = ["py-spy", "record", "--format", "raw", "--rate", "250", "--duration", "6", "--output", str(stacks)]
    with a_process(["taskset", "-c", str(LOAD_CORE), *load]):
        time.sleep(1)
        subprocess.run([str(Path(sys.executable).parent / spy[0]), *spy[1:], "--pid", str(arm.pid)], check=True,
                       capture_output=True)  # fmt: skip
    own: collections.Counter[str] = collections.Counter()
    rooms: collections.Counter[str] = collections.Counter()
    for line in stacks.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if "threading.py" in frames[-1]:
            continue  # the ledger's writer, asleep
        own[frames[-1].rsplit(":", 1)[0]] += int(count)
        rooms[_room(frames)] += int(count)
    total = sum(own.values()) or 1
    return {
        "samples": total,
        "by_room": {name: round(100 * n / total, 1) for name, n in rooms.most_common(15)},
        "by_function": {name: round(100 * n / total, 1) for name, n in own.most_common(25)},
    }


def _room(frames: list[str]) -> str:
    """The innermost package of a stack that says something: a room of inferry, or the library it called."""
    for frame in reversed(frames):
        where = frame[frame.find("(") + 1 :]
        for library in ("uvicorn", "aiohttp", "sqlalchemy", "prometheus_client"):
            if f"{library}/" in where:
                return library
        if "inferry/" in where:
            inside = where.split("inferry/")[-1]
            room = inside.split("/")[0].split(":")[0].removesuffix(".py")
            return "event loop and sockets" if room == "cli" else f"inferry.{room}"
    return "event loop and sockets"


def _median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _line(case: dict[str, Any]) -> str:
    arms = [
        f"{name} {case[name]['requests_per_s']:.0f}/s p50 {case[name]['p50_ms']} ms" for name in ("bare", "inferry")
    ]
    return ", ".join(arms) + f", ratio {case['requests_ratio']}"


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
