"""`/v1/runs/{id}/timeline`: the calls of a run tree, as JSON and for Perfetto."""

import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferry.domain.decisions import Decision, to_text
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.ingress.openapi.timeline_responses import PerfettoTrace, RunTimeline
from inferry.ingress.run_timeline import perfetto, place, recorded_call, timeline
from inferry.ledger.stores.attempts import AttemptStore
from support.scripted_gateway import ScriptedGateway
from support.serving import post

CANARY = "canary-40b2ce"
BASE = float(int(time.time()) - 86_400)
DECISION = Decision(
    picked_by="affinity", candidates=2, held_by="window", held_s=0.1, limit="sequences", limit_worker="w"
)


def a_row(job: str, run: str, ended_at: float, attempt: int = 1, **fields: Any) -> LedgerEntry:
    given: dict[str, Any] = {
        "tenant": "default", "step_id": job, "model": "m", "lane": "P1", "outcome": Outcome.DONE, "worker": "w",
        "prompt_tokens": 10, "output_tokens": 5, "total_ms": 1000.0, "queue_ms": 200.0, "first_token_ms": 500.0,
        "batching_ms": 100.0, "decision": to_text(DECISION),
    }  # fmt: skip
    return LedgerEntry(job_id=job, attempt=attempt, run_id=run, ended_at=BASE + ended_at, **(given | fields))


ROWS = [
    a_row("1", "top", 1001.0),
    a_row("2", "top", 1005.0),
    a_row("3", "child", 1004.5, parent_run="top", total_ms=2000.0),
    a_row("4", "grandchild", 1006.0, parent_run="child"),
    a_row("5", "top", 1010.0, tenant="other"),
    a_row("6", "elsewhere", 1003.0),
]


class Gateway(ScriptedGateway):
    def ask(self, path: str, tenant: str = "default", method: str = "GET") -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)
        try:
            connection.request(method, path, headers={"x-inferry-tenant": tenant})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def timeline(self, run: str, query: str = "") -> RunTimeline:
        status, body = self.ask(f"/v1/runs/{run}/timeline{query}")
        assert status == 200, body
        return msgspec.json.decode(body, type=RunTimeline)

    def call(self, run: str, step: str, content: str) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
        return post(self.url, "/v1/chat/completions", body, {"x-inferry-run-id": run, "x-inferry-step-id": step})[0]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    ledger = AttemptStore(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.append(ROWS)
    ledger.close()
    with Gateway(tmp_path) as gateway:
        yield gateway


def test_the_calls_of_a_run_and_its_sub_runs_in_order_with_waits_and_gaps(gateway: Gateway) -> None:
    found = gateway.timeline("top")
    assert [(one.job_id, one.run_id) for one in found.data] == [
        ("1", "top"), ("3", "child"), ("2", "top"), ("4", "grandchild"),
    ]  # fmt: skip
    first, _, second, _ = found.data
    assert (first.queue_ms, first.batching_ms, first.prefill_ms, first.decode_ms) == (200.0, 100.0, 300.0, 500.0)
    assert (first.gap_ms, second.gap_ms) == (None, 3000.0)
    assert (first.worker, first.attempt, first.status) == ("w", 1, "done")
    assert first.decision is not None
    assert (first.decision.limit, first.decision.held_ms) == ("sequences", 100.0)
    assert first.decision_text is not None
    assert first.decision_text.startswith("Held 100.0 ms for the lane's batching window.")
    assert (found.has_more, found.next_cursor) == (False, None)


def test_pages_cover_everything_once_and_keep_the_gaps(gateway: Gateway) -> None:
    whole = gateway.timeline("top").data
    pages, query = [], "?limit=1"
    for _ in whole:
        page = gateway.timeline("top", query)
        pages += page.data
        if page.next_cursor is None:
            break
        query = f"?limit=1&cursor={page.next_cursor}"
    assert pages == whole


def test_a_run_of_another_tenant_is_unknown(gateway: Gateway) -> None:
    assert gateway.ask("/v1/runs/elsewhere/timeline", "other")[0] == 404
    assert gateway.ask("/v1/runs/nothing/timeline")[0] == 404
    status, body = gateway.ask("/v1/runs/top/timeline", "other")
    assert status == 200
    assert [one.job_id for one in msgspec.json.decode(body, type=RunTimeline).data] == ["5"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("?format=xml", 400),
        ("?limit=0", 400),
        ("?limit=1001", 400),
        ("?cursor=x", 400),
        ("?cursor=MS4w", 400),
        ("?a=b", 400),
    ],
)
def test_invalid_parameters_are_refused(gateway: Gateway, query: str, status: int) -> None:
    assert gateway.ask(f"/v1/runs/top/timeline{query}")[0] == status
    assert gateway.ask("/v1/runs/top/timeline", method="POST")[0] == 405


def test_calls_in_flight_are_shown_with_what_they_wait_for(gateway: Gateway) -> None:
    async def hold() -> None:
        gateway.worker.gate.clear()

    async def release() -> None:
        gateway.worker.gate.set()

    gateway.run(hold())
    callers = [threading.Thread(target=gateway.call, args=("live", step, CANARY)) for step in "ab"]
    for caller in callers:
        caller.start()
    try:
        until = time.monotonic() + 120
        while len(data := _timeline_or_nothing(gateway, "live")) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert {one.ended_at for one in data} == {None}
        assert {one.status for one in data} <= {"queued", "sent", "streaming"}
        assert all(one.decision is not None for one in data)
        trace = msgspec.json.decode(gateway.ask("/v1/runs/live/timeline?format=perfetto")[1], type=PerfettoTrace)
        assert len([event for event in trace.traceEvents if event["name"] == "queue"]) == 2
    finally:
        gateway.run(release())
        for caller in callers:
            caller.join()
    while len(done := [one for one in gateway.timeline("live").data if one.status == "done"]) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert all(one.decision is not None and one.decision.picked_by == "least_loaded" for one in done)
    shown = [gateway.ask(f"/v1/runs/live/timeline{query}")[1] for query in ("", "?format=perfetto")]
    assert not any(CANARY.encode() in body for body in shown)


def _timeline_or_nothing(gateway: Gateway, run: str) -> list[Any]:
    status, body = gateway.ask(f"/v1/runs/{run}/timeline")
    return msgspec.json.decode(body, type=RunTimeline).data if status == 200 else []


def test_a_perfetto_trace_has_a_process_per_run_and_slices_that_nest(gateway: Gateway) -> None:
    status, body = gateway.ask("/v1/runs/top/timeline?format=perfetto")
    assert status == 200
    trace = msgspec.json.decode(body, type=PerfettoTrace)
    named = [event["args"]["name"] for event in trace.traceEvents if event["name"] == "process_name"]
    assert named == ["run top", "run child", "run grandchild"]
    slices = [event for event in trace.traceEvents if event["ph"] == "X"]
    assert {event["name"] for event in slices} == {
        "tools", "queue", "batching", "prefill", "decode", "P1 m: done",
    }  # fmt: skip
    _check_nesting(slices)
    assert trace.otherData == {"run": "top"}


def test_overlapping_calls_of_a_step_have_tracks_of_their_own_and_retries_follow_each_other() -> None:
    rows = [
        a_row("a", "r", 101.0, step_id="s"),
        a_row("b", "r", 101.5, step_id="s"),
        a_row("c", "r", 104.0, step_id="s", outcome=Outcome.FAILED, error_code="worker_lost", first_token_ms=None),
        a_row("c", "r", 105.0, 2, step_id="s", total_ms=2000.0, queue_ms=1300.0, first_token_ms=1500.0),
    ]
    placed = place([recorded_call(row) for row in rows], {})
    events = perfetto("r", placed, "next", 200.0)
    tracks = [event["args"]["name"] for event in events["traceEvents"] if event["name"] == "thread_name"]
    assert tracks == ["s", "s (2)", "between calls"]
    _check_nesting([event for event in events["traceEvents"] if event["ph"] == "X"])
    assert events["otherData"] == {"run": "r", "next_cursor": "next"}
    items = timeline("r", placed, None, 200.0)["data"]
    assert [(item["job_id"], item["attempt"], item["queue_ms"]) for item in items[2:]] == [
        ("c", 1, 200.0),
        ("c", 2, 300.0),
    ]
    assert [item["gap_ms"] for item in items] == [None, None, 1500.0, None]


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """On one track, two slices are apart or one contains the other."""
    for one in slices:
        for other in slices:
            if one is not other and (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                first, last = sorted((one, other), key=lambda event: (event["ts"], -event["dur"]))
                end = first["ts"] + first["dur"]
                assert last["ts"] >= end or last["ts"] + last["dur"] <= end, (first, last)
