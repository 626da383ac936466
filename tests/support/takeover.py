"""Takeover and cancels by the clock: `python -m support.takeover TIMES`, with Redis, PostgreSQL and three gateways.

Kills the owner of the workers again and again, with the default `ttl_ms`: seconds until another gateway owns the
workers, and until every survivor has served a call. Then cancels runs at one gateway whose calls stream through
another. Twenty times and more are written to benchmarks/results/takeover.json, with the load of the machine.
"""

import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import result_files
from support.chaos_processes import Cluster, Member
from support.postgres import PostgresServer
from support.seed_results import PARTIAL
from support.waiting import until

TTL_MS = 3000
WHOLE = 20
TAKEOVER_GOAL_S, CANCEL_GOAL_S = 5.0, 0.25
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


def takeover_s(cluster: Cluster) -> tuple[float, float]:
    """Kill the owner. Seconds until another gateway is the owner, and until each of the others has served a call."""
    until(lambda: cluster.owner() is not None, every_s=0.05)
    owner = cluster.owner()
    assert owner is not None
    others = [one for one in cluster.gateways if one is not owner]
    owned: list[float] = []
    served: list[float] = []
    owner.kill()
    began = time.monotonic()

    def own() -> None:
        until(lambda: any(one.metric("inferry_domain_owner") == 1 for one in others), every_s=0.02)
        owned.append(time.monotonic() - began)

    def serve(gateway: Member) -> None:
        until(lambda: _is_served(gateway), every_s=0.02)
        served.append(time.monotonic() - began)

    _together([threading.Thread(target=own), *(threading.Thread(target=serve, args=(one,)) for one in others)])
    owner.start()
    until(lambda: owner.answers("/ready"), every_s=0.1, problem=owner.log.read_text)
    return owned[0], max(served)


def _is_served(gateway: Member) -> bool:
    body = {"model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 2}
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60.0)
    try:
        connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def cancel_s(through: Member, at: Member, run_id: str) -> float:
    """Seconds from the cancel of a run at one gateway until its stream through another has ended."""
    body = {"model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 4000, "stream": True}
    stream = http.client.HTTPConnection("127.0.0.1", through.port, timeout=60.0)
    stream.request("POST", COMPLETIONS, json.dumps(body), {**JSON, "x-inferry-run-id": run_id})
    response = stream.getresponse()
    raw = response.read1(65_536)
    time.sleep(0.5)  # a gateway looks for runs that were cancelled before they began there later than for others
    ended: list[float] = []

    def read() -> None:
        nonlocal raw
        while piece := response.read1(65_536):
            raw += piece
        ended.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    connection = http.client.HTTPConnection("127.0.0.1", at.port, timeout=60.0)
    began = time.monotonic()
    connection.request("DELETE", f"/v1/runs/{run_id}")
    assert connection.getresponse().status == 200
    reader.join(60.0)
    connection.close()
    stream.close()
    assert b"run_cancelled" in raw, raw[-500:]
    return ended[0] - began


def _together(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(cluster: Cluster, times: int) -> dict[str, Any]:
    owned, served, cancels = [], [], []
    loads = [os.getloadavg()[0]]
    for number in range(times):
        one = takeover_s(cluster)
        owned.append(one[0])
        served.append(one[1])
        print(f"takeover {number + 1}: owned after {one[0]:.2f} s, served everywhere after {one[1]:.2f} s", flush=True)
    loads.append(os.getloadavg()[0])
    rng = random.Random(times)
    for number in range(times):
        through, at = rng.sample(cluster.gateways, 2)
        cancels.append(cancel_s(through, at, f"cancelled-{number}"))
        print(f"cancel {number + 1}: {1000 * cancels[-1]:.0f} ms", flush=True)
    loads.append(os.getloadavg()[0])
    return {
        "times": times,
        "ttl_ms": TTL_MS,
        "owned_s": _summary(owned, TAKEOVER_GOAL_S),
        "served_by_every_gateway_s": _summary(served, TAKEOVER_GOAL_S),
        "cancelled_at_another_gateway_s": _summary(cancels, CANCEL_GOAL_S),
        "load_average": [round(one, 1) for one in loads],
        "cores": os.cpu_count(),
    }


def _summary(found: Sequence[float], goal: float) -> dict[str, Any]:
    return {
        "median": round(statistics.median(found), 3),
        "max": round(max(found), 3),
        "goal": goal,
        "within_goal": sum(one <= goal for one in found),
        "all": [round(one, 3) for one in found],
    }


def main() -> int:
    times = int(sys.argv[1])
    with (
        PostgresServer() as postgres,
        tempfile.TemporaryDirectory(prefix="inferry-takeover-", dir="/tmp") as directory,
        Cluster(Path(directory), postgres.database(), ttl_ms=TTL_MS) as cluster,
    ):
        found = measure(cluster, times)
        cluster.stop()
    folder = result_files.RESULTS if times >= WHOLE else PARTIAL
    path = result_files.save("takeover", found, command=f"python -m support.takeover {times}", folder=folder)
    print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
