"""What the gateway costs per call, beside a bare pass-through and other gateways, in one run.

All stand in front of the same instant backend (`benchmarks.tools`) and get the same closed-loop load, in alternating
rounds. The gateway under test has one core; backend and load generator share the other. The work differs: ours streams
every call upstream, also where the client wants a whole answer, and the backend then sends eighteen events instead of
one body. Other gateways take part where they are installed (`benchmarks.peers`). Ours also runs with a key and every
limit, with traces, alerts, a price per GPU-hour and a viewer of the dashboard besides, as plain Python, and compiled as
it was in the commit that BEFORE names, with the configuration keys of that commit. The pass-through is plain Python.
Needs a C compiler and py-spy. `benchmarks.before_after` compares two compiled trees without the others.
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

from benchmarks.peers import installed, start_peer
from benchmarks.serving import (
    cpu_seconds,
    free_port,
    run_gateway,
    run_gateway_with_key,
    run_process,
    wait_for,
    wait_until_idle,
)
from benchmarks.tools import Tools, build_tools
from benchmarks.uncompiled import SOURCE, build_package_at
from inferry.cli.checkout import is_compiled

ROUNDS = 9
SECONDS = 1.2
PACED_ROUNDS = 3
PACED_SECONDS = 4.0
ITL_US = 20_000
STREAMS = 512
GATEWAY_CORE, LOAD_CORE = 0, 1
TOO_SLOW_FOR_STREAMS = ("litellm",)
"""Gateways that pass on fewer events per second than these streams have in 20 ms."""

WITH_LIMITS = "inferry, key and every limit"
WITH_EVERYTHING = "inferry, everything on"
PLAIN = "inferry, plain Python"
BEFORE = "inferry, commit before"
TENANT = "acme"
LIMITS = {
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**12,
    "max_concurrent": 10**5,
    "run_token_ceiling": 10**12,
    "day_token_ceiling": 10**13,
    "month_money_ceiling": 1e9,
}
"""All are checked for every call; none is ever reached."""
ADMIN_KEY = "the-admin-key-of-this-benchmark"
VIEWER = """
import sys, urllib.request
url, key = sys.argv[1:]
headers = {"authorization": f"Bearer {key}", "accept": "text/event-stream"}
for line in urllib.request.urlopen(urllib.request.Request(url, headers=headers)):
    pass
"""
"""A program that reads the dashboard's stream, which has an event every second."""

CALL = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are the triage agent of a support desk. Classify the ticket in one word."},
        {"role": "user", "content": "I was charged twice for my March invoice and have not been refunded. Help."},
    ],
    "max_tokens": 16,
    "temperature": 0,
}

CASES = {"c1": ("whole", 1), "c32": ("whole", 32), "c32_stream": ("stream", 32), "c8_400kB": ("long", 8)}
"""By case: the body of a call and the number of connections."""

Run = dict[str, float]


class Arm:
    """A gateway under test: its port, its process, and the headers a call needs."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes], headers: tuple[str, ...] = ()) -> None:
        self.name, self.port, self.pid, self.headers = name, port, process.pid, headers


def measure() -> dict[str, Any]:
    peers = installed()
    if not peers:
        print("no other gateway is installed (make venv-peers): their arms are left out", flush=True)
    with tempfile.TemporaryDirectory() as name:
        tools = build_tools(Path(name))
        bodies = write_bodies(tools.directory)
        instant = _instant(tools, bodies, list(peers))
        paced = _paced(tools, bodies, [peer for peer in peers if peer not in TOO_SLOW_FOR_STREAMS])
    before = os.environ.get("BEFORE")
    return {
        "targets": _targets(instant, paced),
        "peers": peers,
        **({"before": before} if before else {}),
        "instant": instant,
        "paced": paced,
    }


def _targets(instant: dict[str, Any], paced: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target beside what was measured."""
    c1, c32, long = instant["c1"], instant["c32"], instant["c8_400kB"]
    added_ms = c1["inferry"]["p50_ms"] - c1["bare"]["p50_ms"]
    targets = {
        "requests_of_bare": (c32["ratio_to"]["bare"], ">=", 0.6),
        "long_prompts_of_bare": (long["ratio_to"]["bare"], ">=", 0.8),
        "added_p50_ms": (round(added_ms, 3), "<=", 0.5),
        "cpu_per_event_of_bare": (paced["cpu_per_event_ratio_to"]["bare"], "<=", 1.3),
    }
    if "litellm" in c32["ratio_to"]:
        targets["requests_of_litellm"] = (c32["ratio_to"]["litellm"], ">=", 30)
    if BEFORE in c32["ratio_to"]:
        for case in ("c32", "c32_stream", "c8_400kB"):
            targets[f"{case}_with_limits_of_before"] = (instant[case]["with_limits_ratio_to"][BEFORE], ">=", 0.9)
        cost = paced["with_limits_cpu_per_event_ratio_to"][BEFORE]
        targets["cpu_per_event_with_limits_of_before"] = (cost, "<=", 1.1)
    return {
        name: {"is": found, "target": f"{sign} {bound}", "met": found >= bound if sign == ">=" else found <= bound}
        for name, (found, sign, bound) in targets.items()
    }


def write_bodies(directory: Path) -> dict[str, Path]:
    long = CALL | {"messages": [{"role": "user", "content": "The invoice was charged twice. " * 13_000}]}
    bodies = {"whole": CALL, "stream": CALL | {"stream": True}, "long": long}
    for name, body in bodies.items():
        (directory / name).write_text(json.dumps(body, separators=(",", ":")))
    return {name: directory / name for name in bodies}


def _instant(tools: Tools, bodies: dict[str, Path], peers: list[str]) -> dict[str, Any]:
    """The cost of a call, in front of an instant backend."""
    with _arms(tools, itl_us=0, peers=peers) as arms:
        found = alternate(
            arms, {case: load_with(tools, bodies[body], count) for case, (body, count) in CASES.items()}, ROUNDS
        )
        profile = _profile(_profiled_arm(arms), tools, bodies["whole"], 32)
    out: dict[str, Any] = {}
    for case in CASES:
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
        rates = {name: [run["rps"] for run in runs] for name, runs in by_arm.items()}
        out[case]["ratio_to"] = _ratios(rates)
        out[case]["with_limits_ratio_to"] = _ratios(rates, WITH_LIMITS)
        print(f"{case}: " + _line(out[case]), flush=True)
    return out | {"profile_c32": profile}


def _paced(tools: Tools, bodies: dict[str, Path], peers: list[str]) -> dict[str, Any]:
    """The cost of an event: 512 streams with a token every 20 ms."""
    with _arms(tools, itl_us=ITL_US, peers=peers) as arms:
        load = load_with(tools, bodies["stream"], STREAMS, seconds=PACED_SECONDS)
        found = alternate(arms, {"streams": load}, PACED_ROUNDS)
        profile = _profile(_profiled_arm(arms), tools, bodies["stream"], STREAMS)
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
    out["cpu_per_event_ratio_to"] = _ratios(costs)
    out["with_limits_cpu_per_event_ratio_to"] = _ratios(costs, WITH_LIMITS)
    print(f"512 streams: CPU per event, against others: {out['cpu_per_event_ratio_to']}", flush=True)
    for where, share in list(profile["by_room"].items())[:12]:
        print(f"  {share:5.1f} %  {where}")
    return out | {"profile": profile}


@contextmanager
def run_backend(tools: Tools, itl_us: int) -> Iterator[int]:
    """A server that computes nothing: its port."""
    port = free_port()
    with run_process([str(tools.mock_llm), str(port), "16", str(itl_us)], core=LOAD_CORE) as mock:
        wait_for(f"http://127.0.0.1:{port}/v1/models", mock)
        yield port


def config_for_backend(port: int) -> dict[str, Any]:
    worker = {"name": "mock", "kind": "vllm", "url": f"http://127.0.0.1:{port}", "models": ["m"]}
    # Every call is identical here, and each has to run.
    return {"workers": [worker | {"max_sequences": 4096}], "single_flight": {"identical": False}}


@contextmanager
def run_limited(name: str, config: dict[str, Any], package: Path | None = None) -> Iterator[Arm]:
    """The gateway with a key, a run id and every limit on each call."""
    limited = {"tenants": {TENANT: LIMITS}, "prices": {"*": {"input": 1.0, "output": 3.0}}} | config
    with run_gateway_with_key(limited, TENANT, core=GATEWAY_CORE, package=package) as (port, process, key):
        yield Arm(name, port, process, (f"authorization: Bearer {key}", "x-inferry-run-id: ticket-17"))


def config_with_everything(config: dict[str, Any], backend: int) -> dict[str, Any]:
    """What an operator may add besides limits: traces of all calls, alerts, a price per GPU-hour, the dashboard."""
    # The backend receives spans and alerts too, since it answers every completion with 200.
    receiver = f"http://127.0.0.1:{backend}/v1/completions"
    webhook = {"url": receiver, "secret": f"whsec_{'A' * 32}", "allow_http": True, "allowed_networks": ["127.0.0.0/8"]}
    return config | {
        "tracing": {"endpoint": receiver},
        "alerts": {"webhook": webhook},
        "prices": {"*": {"gpu_hour": 2.0}},
        "server": {"admin_key": ADMIN_KEY},
    }


@contextmanager
def run_with_everything(
    config: dict[str, Any], backend: int, name: str = WITH_EVERYTHING, package: Path | None = None
) -> Iterator[Arm]:
    """The gateway with a key, every limit, and everything else; the dashboard has a viewer."""
    with run_limited(name, config_with_everything(config, backend), package) as arm:
        stream = f"http://127.0.0.1:{arm.port}/admin/overview/stream"
        with run_process([sys.executable, "-c", VIEWER, stream, ADMIN_KEY], core=LOAD_CORE, quiet=True) as viewer:
            yield arm
            if viewer.poll() is not None:
                raise RuntimeError("the viewer of the dashboard ended before the measurement")


@contextmanager
def _arms(tools: Tools, itl_us: int, peers: list[str]) -> Iterator[list[Arm]]:
    """The backend, and all gateways in front of it."""
    with ExitStack() as stack:
        backend = stack.enter_context(run_backend(tools, itl_us))
        bare_port = free_port()
        command = [sys.executable, "-m", "benchmarks.passthrough", str(bare_port), str(backend)]
        bare = stack.enter_context(run_process(command, core=GATEWAY_CORE))
        wait_for(f"http://127.0.0.1:{bare_port}/v1/models", bare)
        config = config_for_backend(backend)
        port, process = stack.enter_context(run_gateway(config, core=GATEWAY_CORE))
        arms = [Arm("bare", bare_port, bare), Arm("inferry", port, process)]
        if is_compiled():
            served = run_gateway(config, core=GATEWAY_CORE, package=SOURCE)
            arms.append(Arm(PLAIN, *stack.enter_context(served)))
        if commit := os.environ.get("BEFORE"):
            tree = tools.directory / "before"
            tree.mkdir(exist_ok=True)
            served = run_gateway(config, core=GATEWAY_CORE, package=build_package_at(commit, tree))
            arms.append(Arm(BEFORE, *stack.enter_context(served)))
        arms.append(stack.enter_context(run_limited(WITH_LIMITS, config)))
        arms.append(stack.enter_context(run_with_everything(config, backend)))
        for peer in peers:
            arms.append(Arm(peer, *stack.enter_context(start_peer(peer, backend, tools.directory, core=GATEWAY_CORE))))
        yield arms


def load_with(tools: Tools, body: Path, connections: int, seconds: float = SECONDS) -> Callable[[Arm], Run]:
    def load(arm: Arm) -> Run:
        before, begin = cpu_seconds(arm.pid), time.monotonic()
        command = [
            *(str(tools.http_load), str(arm.port), "/v1/chat/completions"),
            *(str(connections), str(seconds), str(body), *arm.headers),
        ]
        done = subprocess.run(["taskset", "-c", str(LOAD_CORE), *command], capture_output=True, text=True, check=True)
        wall_s = time.monotonic() - begin
        output: Run = json.loads(done.stdout)
        cpu_s = cpu_seconds(arm.pid) - before
        wait_until_idle(arm.pid)  # leftover work of one load must not slow down the next
        return output | {"cpu_s": cpu_s, "wall_s": wall_s}

    return load


def alternate(arms: list[Arm], loads: dict[str, Callable[[Arm], Run]], rounds: int) -> dict[tuple[str, str], list[Run]]:
    """Alternate between the arms, so that changes of the machine affect all alike. The first round is warm-up."""
    found: dict[tuple[str, str], list[Run]] = collections.defaultdict(list)
    for round_number in range(rounds + 1):
        for case, load in loads.items():
            for arm in arms if round_number % 2 else reversed(arms):
                run = load(arm)
                if round_number:
                    found[arm.name, case].append(run)
    return found


def _ratios(figures: dict[str, list[float]], of: str = "inferry") -> dict[str, float]:
    """Ours over each other arm's, round by round; the median of these ratios."""
    ours = figures[of]
    return {
        name: round(statistics.median(a / b if b else 0.0 for a, b in zip(ours, others, strict=True)), 3)
        for name, others in figures.items()
        if name != of
    }


def _profiled_arm(arms: list[Arm]) -> Arm:
    """The plain-Python arm if there is one: compiled modules have no frames that py-spy sees."""
    return next(arm for name in (PLAIN, "inferry") for arm in arms if arm.name == name)


def _profile(arm: Arm, tools: Tools, body: Path, connections: int) -> dict[str, Any]:
    """Where the gateway's time goes, by function and by package, in percent of samples."""
    stacks = tools.directory / "stacks"
    load = [str(tools.http_load), str(arm.port), "/v1/chat/completions", str(connections), "8", str(body)]
    spy = ["py-spy", "record", "--format", "raw", "--rate", "250", "--duration", "6", "--output", str(stacks)]
    with run_process(["taskset", "-c", str(LOAD_CORE), *load]):
        time.sleep(1)
        subprocess.run([str(Path(sys.executable).parent / spy[0]), *spy[1:], "--pid", str(arm.pid)], check=True,
                       capture_output=True)  # fmt: skip
    own: collections.Counter[str] = collections.Counter()
    components: collections.Counter[str] = collections.Counter()
    for line in stacks.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if "threading.py" in frames[-1]:
            continue  # the ledger's writer thread, waiting
        own[frames[-1].rsplit(":", 1)[0]] += int(count)
        components[_component(frames)] += int(count)
    total = sum(own.values()) or 1
    return {
        "samples": total,
        "by_room": {name: round(100 * n / total, 1) for name, n in components.most_common(15)},
        "by_function": {name: round(100 * n / total, 1) for name, n in own.most_common(25)},
    }


def _component(frames: list[str]) -> str:
    """The innermost known package of a stack: a package of inferry, or the library that it called."""
    for frame in reversed(frames):
        where = frame[frame.find("(") + 1 :]
        for library in ("uvicorn", "aiohttp", "sqlalchemy", "prometheus_client"):
            if f"{library}/" in where:
                return library
        if "inferry/" in where:
            inside = where.split("inferry/")[-1]
            component = inside.split("/")[0].split(":")[0].removesuffix(".py")
            return "event loop and sockets" if component == "cli" else f"inferry.{component}"
    return "event loop and sockets"


def _median(runs: list[Run], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _line(case: dict[str, Any]) -> str:
    arms = [
        f"{name} {figures['requests_per_s']:.0f}/s p50 {figures['p50_ms']:.2f} ms"
        for name, figures in case.items()
        if not name.endswith("ratio_to")
    ]
    return ", ".join(arms) + f"; ratios {case['ratio_to']}, with limits {case['with_limits_ratio_to']}"


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
