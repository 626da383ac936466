"""30 s at three times the capacity between quiet times, with standard clients.

The engine's capacity is known exactly (`slot_server`): slots over the service time. Clients are the official `openai`
client with its own two retries, in separate processes, and each call has a deadline. Two arms run side by side, each
with its own engine, gateway and clients and the same schedule, so that the machine affects both alike:

- `retry_slots`: the default gateway. A refused call gets a retry slot and is served first when it comes back on time.
- `no_retry_slots`: without retry slots (`server.retry_slots: false`), and clients do not see a refusal's Retry-After.

Targets: answers within their deadline at 0.95 of the capacity or more during the overload, five times fewer errors for
clients than with plain 429s, unchanged TTFT attainment, and no admitted call lost.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.serving import cpu_seconds, free_port, parse_metrics, run_gateway, run_process, wait_for
from inferry.ledger.stores.opening import open_queries

SLOTS, SERVICE_MS = 4, 500
CAPACITY = SLOTS * 1000 / SERVICE_MS
QUIET_S, PULSE_S, AFTER_S = 15.0, 30.0, 85.0
QUIET = {"P0": 0.10, "P1": 0.15, "P2": 0.05}
"""Arrival rates by lane, as fractions of the capacity."""
PULSE = {"P0": 0.20, "P1": 0.50, "P2": 2.30}
DEADLINE_S = {"P0": 5.0, "P1": 20.0, "P2": 150.0}
"""Seconds from the first attempt to the whole answer."""
MAX_QUEUED_S = {"P0": 2.0, "P1": 10.0, "P2": 60.0}
"""The deadline header of each attempt."""
QUEUES = {"P0": 24, "P1": 40, "P2": 80}
FIRST_TOKEN_S = {"P0": 0.5, "P1": 2.0}
ARMS: dict[str, dict[str, Any]] = {"retry_slots": {}, "no_retry_slots": {"retry_slots": False}}
ROUNDS = 2


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    return summarised([play(seed) for seed in range(rounds)])


def summarised(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    rounds = len(blocks)
    summary = {arm: {name: statistics.mean(block[arm][name] for block in blocks) for name in _SHOWN} for arm in ARMS}
    ours, without = summary["retry_slots"], summary["no_retry_slots"]
    ratio = without["errors"] / max(ours["errors"], 1 / rounds)
    lost = sum(block["retry_slots"]["accepted_and_lost"] for block in blocks)
    result = {
        "capacity_per_s": CAPACITY,
        "pulse_of_capacity": sum(PULSE.values()),
        "targets": {
            "goodput_in_pulse_of_capacity": {"is": round(ours["goodput_in_pulse"], 3), "wanted": ">= 0.95"},
            "errors_without_over_with_retry_slots": {"is": round(ratio, 1), "wanted": ">= 5"},
            "live_attainment_in_pulse_less_before": {
                "is": round(ours["live_attainment_in_pulse"] - ours["live_attainment_before"], 3),
                "wanted": ">= -0.02",
            },
            "accepted_and_lost": {"is": lost, "wanted": "0"},
        },
        "summary": summary,
        "blocks": blocks,
    }
    print(json.dumps(result["targets"], indent=2), flush=True)
    return result


_SHOWN = (
    "calls",
    "errors",
    "answers_in_time",
    "goodput_in_pulse",
    "goodput_until_all_could_be_done",
    "live_attainment_before",
    "live_attainment_in_pulse",
    "attempts_per_answer",
)


def play(
    seed: int, arms: Mapping[str, dict[str, Any]] = ARMS, packages: Mapping[str, Path] = MappingProxyType({})
) -> dict[str, Any]:
    """All arms at once, with the same schedule. Some may import the package from another directory."""
    schedule = _schedule(random.Random(seed))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        ports, gateways, engines, starting = {}, {}, {}, {}
        threads = stack.enter_context(ThreadPoolExecutor(len(arms)))
        for arm, server in arms.items():
            engine = free_port()
            module = [sys.executable, "-m", "benchmarks.slot_server", str(engine), str(SLOTS), str(SERVICE_MS)]
            engines[arm] = stack.enter_context(run_process(module))
            wait_for(f"http://127.0.0.1:{engine}/v1/models", engines[arm])
            worker = {"name": "slots", "kind": "vllm", "url": f"http://127.0.0.1:{engine}", "models": ["m"]}
            config = {
                "server": server,
                "ledger": f"sqlite:///{directory / arm}.db",
                # A slot becomes free every 125 ms: a first token needs neither a reserve nor preemption, and both would
                # cost capacity.
                "lanes": {
                    lane: {"queue_limit": limit, "reserve": 0.0, "may_preempt": []} for lane, limit in QUEUES.items()
                },
                "workers": [worker | {"max_sequences": SLOTS, "capacity": "fixed"}],
            }
            gateway = run_gateway(config, package=packages.get(arm))
            starting[arm] = threads.submit(gateway.__enter__)
            stack.push(gateway)
        for arm, started in starting.items():
            ports[arm], gateways[arm] = started.result()
        found = _callers(schedule, ports)
        pages = {arm: _gauges(port) for arm, port in ports.items()}
        cpu = {arm: round(cpu_seconds(process.pid), 2) for arm, process in gateways.items()}
        stack.pop_all().close()
        block = {}
        for arm, output in found.items():
            block[arm] = _figures(output["calls"]) | {
                "refusals": output["refusals"],
                "gateway_cpu_s": cpu[arm],
            }
            if arm not in packages:
                block[arm] |= _accounts(f"sqlite:///{directory / arm}.db", output["calls"], pages[arm])
            print(f"seed {seed}, {arm}: {block[arm]}", flush=True)
    return block


def _schedule(rng: random.Random) -> list[dict[str, Any]]:
    """Poisson arrivals of every lane, by time."""
    calls: list[dict[str, Any]] = []
    spans = ((0.0, QUIET_S, QUIET), (QUIET_S, QUIET_S + PULSE_S, PULSE), (QUIET_S + PULSE_S, _until(), QUIET))
    for begin, end, loads in spans:
        for lane, load in loads.items():
            at = begin
            while (at := at + rng.expovariate(load * CAPACITY)) < end:
                calls.append({"at": at, "lane": lane, "deadline_ms": round(1000 * MAX_QUEUED_S[lane])})
    calls.sort(key=lambda call: call["at"])
    return [call | {"number": number} for number, call in enumerate(calls)]


def _until() -> float:
    return QUIET_S + PULSE_S + AFTER_S


def _callers(schedule: list[dict[str, Any]], ports: dict[str, int]) -> dict[str, Any]:
    clients = [sys.executable, "-m", "benchmarks.overload_clients"]
    processes = {
        arm: subprocess.Popen(
            [*clients, f"http://127.0.0.1:{port}", *(["hide_retry_after"] if arm == "no_retry_slots" else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for arm, port in ports.items()
    }
    try:
        for process in processes.values():
            assert process.stdout is not None
            process.stdout.readline()  # it has imported its modules
        output = json.dumps({"begin_at": time.time() + 2.0, "calls": schedule}).encode()
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.write(output)
            process.stdin.close()
        return {arm: json.loads(process.stdout.read()) for arm, process in processes.items() if process.stdout}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _figures(calls: list[dict[str, Any]]) -> dict[str, Any]:
    begin, end = QUIET_S, QUIET_S + PULSE_S
    done = [call for call in calls if "error" not in call]
    in_time = [call for call in done if call["end"] - call["at"] <= DEADLINE_S[call["lane"]]]
    codes: dict[str, int] = {}
    for call in calls:
        if "error" in call:
            codes[call["error"]] = codes.get(call["error"], 0) + 1
    # The first second of the overload fills the slots; later ends were served at capacity.
    busy = end - begin - SERVICE_MS / 1000
    could_be_done = begin + sum(call["at"] >= begin and call["at"] < end for call in calls) / (
        CAPACITY * (1 - sum(QUIET.values()) * AFTER_S / (AFTER_S + PULSE_S))
    )
    return {
        "calls": len(calls),
        "errors": len(calls) - len(done),
        "errors_by_code": codes,
        "errors_by_lane": {lane: sum("error" in call and call["lane"] == lane for call in calls) for lane in QUIET},
        "answers_in_time": len(in_time),
        "goodput_in_pulse": sum(begin + SERVICE_MS / 1000 <= call["end"] < end for call in in_time) / busy / CAPACITY,
        "goodput_until_all_could_be_done": sum(begin <= call["end"] < could_be_done for call in in_time)
        / (could_be_done - begin)
        / CAPACITY,
        "all_could_be_done_after_s": round(could_be_done - begin, 1),
        "last_answer_after_s": round(max(call["end"] for call in done if call["at"] < end) - begin, 1),
        "live_attainment_before": _attainment(calls, 0.0, begin),
        "live_attainment_in_pulse": _attainment(calls, begin, end),
        "live_attainment_after": _attainment(calls, end, _until()),
        "live_attainment_seen_before": _seen(calls, 0.0, begin),
        "live_attainment_seen_in_pulse": _seen(calls, begin, end),
        "attempts_per_answer": statistics.mean(call["attempts"] for call in done),
        "client_late_p99_s": round(sorted(call["late"] for call in calls)[int(0.99 * len(calls))], 3),
        "answers_by_10_s": _by_ten_seconds(in_time),
    }


def _attainment(calls: list[dict[str, Any]], begin: float, end: float) -> float:
    """Fraction of live calls of this time that were sent to the engine, which answers at once, within the lane's TTFT
    target. By the gateway's clock: the clients share the machine's cores."""
    live = [call for call in calls if call["lane"] in FIRST_TOKEN_S and begin <= call["at"] < end]
    attained = [call for call in live if call.get("queue_ms", inf) <= 1000 * FIRST_TOKEN_S[call["lane"]]]
    return len(attained) / len(live)


def _seen(calls: list[dict[str, Any]], begin: float, end: float) -> float:
    """The same by the clients' clocks, from when they sent the call."""
    live = [call for call in calls if call["lane"] in FIRST_TOKEN_S and begin <= call["at"] < end]
    attained = [
        call for call in live if call.get("first", inf) - call["at"] - call["late"] <= FIRST_TOKEN_S[call["lane"]]
    ]
    return len(attained) / len(live)


def _by_ten_seconds(calls: list[dict[str, Any]]) -> list[int]:
    return [sum(10 * n <= call["end"] < 10 * (n + 1) for call in calls) for n in range(int(_until() / 10) + 6)]


def _accounts(url: str, calls: list[dict[str, Any]], page: dict[str, float]) -> dict[str, Any]:
    """Admitted calls in the ledger, against those of clients and metrics."""
    with closing(open_queries(url)) as ledger:
        rows = list(ledger.jobs(limit=10**9))
    outcomes: dict[str, int] = {}
    for row in rows:
        outcome = str(row.error_code or row.outcome)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    jobs = {row.job_id for row in rows}
    answered = sum("error" not in call for call in calls)
    done = len({row.job_id for row in rows if row.error_code is None})
    return {
        "ledger": outcomes,
        "accepted": len(jobs),
        "still_in_flight": page["inferry_jobs_in_flight"],
        "ledger_dropped": page["inferry_ledger_entries_dropped_total"],
        # Admitted, and then neither answered nor refused.
        "accepted_and_lost": done - answered + int(page["inferry_jobs_in_flight"]),
    }


def _gauges(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return parse_metrics(answer.read().decode())
