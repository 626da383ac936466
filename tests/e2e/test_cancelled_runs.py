"""One DELETE ends a tree of runs, at the engine too, and nothing beside it."""

import http.client
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from support.serving import Serving, get, post
from support.waiting import until

RUNS = [("tree", None), ("tree.a", "tree"), ("tree.a.b", "tree.a")]
CALLS = 90


def call(gateway: Serving, run: str, parent: str | None, tokens: int) -> tuple[int, Any]:
    body = {"model": "tiny", "prompt": [7] * 8, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    headers = {"x-inferry-run-id": run} | ({} if parent is None else {"x-inferry-parent-run-id": parent})
    status, _, said = post(gateway.url, "/v1/completions", body, headers)
    return status, said


def delete(gateway: Serving, path: str) -> Any:
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=120)
    try:
        connection.request("DELETE", path)
        return msgspec.json.decode(connection.getresponse().read())
    finally:
        connection.close()


def running(gateway: Serving) -> float:
    lines = get(gateway.url, "/metrics")[2].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("inferry_worker_running_sequences{"))


def test_a_tree_three_deep_is_dead_at_the_engine_after_one_delete(real: Serving) -> None:
    with ThreadPoolExecutor(CALLS + 1) as clients:
        calls = [clients.submit(call, real, *RUNS[number % 3], 700) for number in range(CALLS)]
        until(lambda: get(real.url, "/v1/runs/tree")[2].get("tree", {}).get("in_flight") == CALLS)
        until(lambda: running(real) > 8)
        beside = clients.submit(call, real, "beside", None, 24)
        report = delete(real, "/v1/runs/tree?wait_ms=10000")
        assert report["queued"] + report["running"] == CALLS
        assert report["queued"] > 0
        assert (report["freed"], report["unconfirmed"]) == (report["running"], 0)
        ends = [one.result(timeout=120) for one in calls]
        assert {(status, said["error"]["code"]) for status, said in ends} == {(409, "run_cancelled")}
        status, said = beside.result(timeout=120)
        assert (status, said["usage"]["completion_tokens"]) == (200, 24)
    until(lambda: running(real) == 0)
    assert call(real, "tree.a.b", None, 4)[0] == 409

    def accounts() -> list[Any]:
        pages = [get(real.url, f"/v1/runs/{run}?steps=1000")[2]["latest_steps"] for run, _ in RUNS]
        return [row for page in pages for row in page if "ended_at" in row]

    until(lambda: len(accounts()) == CALLS)
    never_ran = [row for row in accounts() if row["queue_ms"] is None]
    assert len(never_ran) == report["queued"]
    assert all(not any(row["tokens"].values()) and not row["cost_nanos"] for row in never_ran)
