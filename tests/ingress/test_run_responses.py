"""`/v1/runs`: details, listing, finishing and cancelling."""

import base64
import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.ingress.run_responses import hint
from inferry.ingress.run_tools import ToolReports, ToolUse
from inferry.ledger.stores.attempts import AttemptStore
from support.scripted_gateway import ScriptedGateway
from support.serving import post

TOO_LARGE = base64.urlsafe_b64encode(b'[1.0,"x",99999999999999999999999]').decode()


class RunsGateway(ScriptedGateway):
    def ask(self, method: str, path: str, tenant: str = "default", body: bytes | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)
        try:
            connection.request(method, path, body, headers={"x-inferry-tenant": tenant})
            response = connection.getresponse()
            return response.status, msgspec.json.decode(response.read() or b"null")
        finally:
            connection.close()

    def call(self, run: str, parent: str | None = None, tenant: str = "default", step: str | None = None) -> int:
        headers = {"x-inferry-run-id": run, "x-inferry-tenant": tenant}
        if parent is not None:
            headers["x-inferry-parent-run-id"] = parent
        if step is not None:
            headers["x-inferry-step-id"] = step
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 1.0}
        return post(self.url, "/v1/chat/completions", body, headers)[0]

    def page(self, run: str, tenant: str = "default", query: str = "") -> Any:
        """The run's page, once the ledger has caught up."""
        until = time.monotonic() + 120
        while True:
            status, page = self.ask("GET", f"/v1/runs/{quote(run, safe='')}{query}", tenant)
            assert status == 200, page
            rows = [row for row in page["latest_steps"] if "ended_at" in row]
            if page["jobs"]["in_flight"] or len(rows) == page["jobs"]["ended"] or "steps" in query:
                return page
            assert time.monotonic() < until, page
            time.sleep(0.02)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunsGateway]:
    yesterday = time.time() - 86_400
    ledger = AttemptStore(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.append(
        [
            _row("old-1", "yesterday", yesterday, total_ms=2000.0, queue_ms=500.0, cost_nanos=1_500_000_000),
            _row("old-2", "yesterday", yesterday + 8.0, total_ms=1000.0, queue_ms=100.0),
            _row("old-3", "below", yesterday + 9.0, total_ms=1000.0, parent_run="yesterday"),
        ]
    )
    ledger.close()
    with RunsGateway(tmp_path) as gateway:
        yield gateway


def _row(job: str, run: str, ended_at: float, **fields: Any) -> LedgerEntry:
    return LedgerEntry(
        job_id=job, attempt=1, tenant="default", run_id=run, step_id=job, model="m", lane="P1", outcome=Outcome.DONE,
        ended_at=ended_at, prompt_tokens=10, output_tokens=5, **fields,
    )  # fmt: skip


def test_a_page_tells_what_a_run_did_and_what_is_below_it(gateway: RunsGateway) -> None:
    assert [gateway.call("root", step=step) for step in ("one", "two", "two")] == [200] * 3
    assert gateway.call("child", "root") == 200
    page = gateway.page("root")
    assert (page["status"], page["parent_run_id"], page["sub_runs"]) == ("idle", None, ["child"])
    assert (page["steps"], page["jobs"]["ended"], page["jobs"]["done"]) == (2, 3, 3)
    assert page["tokens"]["output"] == 9
    assert (page["tree"]["runs"], page["tree"]["jobs"], page["tree"]["tokens"]["output"]) == (2, 4, 12)
    assert page["waits"]["p50_ms"] is not None
    assert 0 < page["time"]["ratio"] <= 1
    assert {row["step_id"] for row in page["latest_steps"]} == {"one", "two"}
    assert len(gateway.page("root", query="?steps=1")["latest_steps"]) == 1
    child = gateway.page("child")
    assert (child["parent_run_id"], child["lineage"]) == ("root", ["child", "root"])


def test_a_run_that_only_the_ledger_knows_is_shown_from_there(gateway: RunsGateway) -> None:
    page = gateway.page("yesterday")
    assert (page["status"], page["jobs"]["ended"], page["steps"], page["cost"]) == ("idle", 2, 2, 1.5)
    assert page["sub_runs"] == ["below"]
    assert (page["tree"]["runs"], page["tree"]["jobs"]) == (2, 3)
    times = page["time"]
    assert (times["active_ms"], times["queued_ms"], times["tool_ms"]) == (
        pytest.approx(3000, abs=1),
        pytest.approx(600, abs=1),
        pytest.approx(7000, abs=1),
    )
    assert times["ratio"] == pytest.approx(0.3, abs=0.001)
    assert gateway.call("yesterday") == 200
    # Memory has one of three: the ledger's figures stand, as soon as it has the last.
    _until(lambda: gateway.page("yesterday")["jobs"]["ended"] == 3)


def test_a_run_is_finished_and_opened_again_by_a_later_call(gateway: RunsGateway) -> None:
    gateway.call("run")
    status, page = gateway.ask("POST", "/v1/runs/run/finish")
    assert (status, page["status"]) == (200, "finished")
    gateway.call("run")
    assert gateway.page("run")["status"] == "idle"
    assert gateway.ask("POST", "/v1/runs/yesterday/finish")[0] == 200
    assert gateway.ask("POST", "/v1/runs/nobody/finish")[1]["error"]["code"] == "run_not_found"


def test_a_cancel_ends_calls_in_flight_and_refuses_later_ones(gateway: RunsGateway) -> None:
    _hold(gateway)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(gateway.call("child", "root"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    _until(lambda: gateway.worker.running == 3)
    page = gateway.ask("GET", "/v1/runs/root")[1]
    assert (page["status"], page["tree"]["in_flight"]) == ("active", 3)
    status, report = gateway.ask("DELETE", "/v1/runs/root?wait_ms=5000")
    assert status == 200
    assert (report["queued"], report["running"], report["freed"], report["unconfirmed"]) == (0, 3, 3, 0)
    for thread in threads:
        thread.join(20)
    assert answers == [409] * 3
    assert gateway.call("child") == gateway.call("new", "root") == 409
    page = gateway.page("child")
    assert (page["status"], page["cancelled_by_run"], page["jobs"]["cancelled"]) == ("cancelled", "root", 3)
    assert gateway.ask("DELETE", "/v1/runs/root")[1]["running"] == 0


def test_a_run_known_only_to_the_ledger_can_be_cancelled_for_good(gateway: RunsGateway) -> None:
    status, report = gateway.ask("DELETE", "/v1/runs/yesterday")
    assert (status, report["queued"], report["running"]) == (200, 0, 0)
    assert gateway.call("yesterday") == 409
    assert gateway.page("yesterday")["status"] == "cancelled"


@pytest.mark.parametrize(("method", "tail"), [("GET", ""), ("DELETE", ""), ("POST", "/finish")])
def test_a_run_of_another_tenant_is_reported_as_not_found(gateway: RunsGateway, method: str, tail: str) -> None:
    gateway.call("secret", tenant="acme")
    names = ("secret", "yesterday", "missing")
    told = [gateway.ask(method, f"/v1/runs/{name}{tail}", "rival") for name in names]
    texts = [str(answer).replace(name, "X") for (_, answer), name in zip(told, names, strict=True)]
    assert {status for status, _ in told} == {404}
    assert len(set(texts)) == 1
    assert gateway.ask("GET", "/v1/runs", "rival")[1]["data"] == []
    assert gateway.call("secret", tenant="acme") == 200, "and nobody else can cancel it"


def test_runs_are_listed_newest_first_page_by_page_each_once(gateway: RunsGateway) -> None:
    for number in range(5):
        gateway.call(f"run-{number}")
    listed: list[str] = []
    cursor = ""
    for _ in range(10):
        status, page = gateway.ask("GET", f"/v1/runs?limit=2{cursor}")
        assert status == 200
        assert len(page["data"]) <= 2
        listed += [run["id"] for run in page["data"]]
        if not page["has_more"]:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert listed == ["run-4", "run-3", "run-2", "run-1", "run-0", "below", "yesterday"]


def test_a_listing_is_filtered_by_status_parent_and_time(gateway: RunsGateway) -> None:
    gateway.call("one")
    gateway.call("two", "one")
    gateway.ask("POST", "/v1/runs/two/finish")

    def ids(query: str) -> set[str]:
        return {run["id"] for run in gateway.ask("GET", f"/v1/runs?{query}")[1]["data"]}

    assert ids("status=finished") == {"two"}
    assert ids("status=idle") == {"one", "yesterday", "below"}
    assert ids("parent=one") == {"two"}
    assert ids("parent=yesterday") == {"below"}
    assert ids(f"since={time.time() - 3600:.3f}") == {"one", "two"}


def test_ids_in_paths_are_percent_decoded_slashes_too(gateway: RunsGateway) -> None:
    gateway.call("claude-code:s/a")
    assert gateway.page("claude-code:s/a")["id"] == "claude-code:s/a"
    assert gateway.ask("GET", "/v1/runs/claude-code:s/a")[0] == 200
    assert gateway.ask("POST", "/v1/runs/claude-code%3As%2Fa/finish")[1]["status"] == "finished"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/runs/%20", 400),
        ("GET", "/v1/runs/%FF", 400),
        ("GET", "/v1/runs/" + "x" * 257, 400),
        ("GET", "/v1/runs?limit=0", 400),
        ("GET", "/v1/runs?limit=x", 400),
        ("GET", "/v1/runs?status=dead", 400),
        ("GET", "/v1/runs?since=yesterday", 400),
        ("GET", "/v1/runs?cursor=nonsense", 400),
        ("GET", "/v1/runs?cursor=bnVsbA==", 400),
        ("GET", f"/v1/runs/run/timeline?cursor={TOO_LARGE}", 400),
        ("GET", "/v1/runs?colour=red", 400),
        ("DELETE", "/v1/runs/run?wait_ms=99999999", 400),
        ("GET", "/v1/runsome", 404),
        ("POST", "/v1/runs", 405),
        ("PUT", "/v1/runs/run", 405),
        ("POST", "/v1/runs/run", 405),
    ],
)
def test_an_invalid_query_is_explained(gateway: RunsGateway, method: str, path: str, status: int) -> None:
    assert gateway.ask(method, path)[0] == status


def test_a_hint_names_the_dominant_wait() -> None:
    assert "faster inference would help little" in (hint(10_000, 1_000, 100) or "")
    assert "queue" in (hint(10_000, 9_000, 8_000) or "")
    assert hint(10_000, 9_000, 1_000) is None
    assert hint(10, 1, 0) is None


def _hold(gateway: RunsGateway) -> None:
    async def hold() -> None:
        gateway.worker.gate.clear()

    gateway.run(hold())


def _until(condition: Any) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_the_tools_of_a_finished_run_are_on_its_page(gateway: RunsGateway) -> None:
    use = {"search": {"calls": 2, "seconds": 1.5, "errors": 1}}
    for tenant in ("default", "other"):
        assert gateway.call("agent", tenant=tenant) == 200
    assert gateway.ask("GET", "/v1/runs/agent")[1]["tools"] == {}
    status, page = gateway.ask("POST", "/v1/runs/agent/finish", body=msgspec.json.encode({"tools": use}))
    assert (status, page["status"], page["tools"]) == (200, "finished", use)
    for body in (None, b" ", b"{}", b'{"tools":null}'):
        assert gateway.ask("POST", "/v1/runs/agent/finish", body=body)[1]["tools"] == use
    assert gateway.ask("GET", "/v1/runs/agent", "other")[1]["tools"] == {}
    recorded = b'{"tools":{"write":{"calls":1,"seconds":2}}}'
    assert gateway.ask("POST", "/v1/runs/yesterday/finish", body=recorded)[0] == 200
    write = {"calls": 1, "seconds": 2.0, "errors": 0}
    assert gateway.ask("GET", "/v1/runs/yesterday")[1]["tools"] == {"write": write}
    assert gateway.ask("POST", "/v1/runs/unknown/finish", body=recorded)[0] == 404


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"tools":[]}',
        b'{"tools":{"":{"calls":1,"seconds":1}}}',
        b'{"tools":{"%b":{"calls":1,"seconds":1}}}' % (65 * b"x"),
        b'{"tools":{"a\\nb":{"calls":1,"seconds":1}}}',
        b'{"tools":{"a":{"calls":-1,"seconds":1}}}',
        b'{"tools":{"a":{"calls":1,"seconds":-1}}}',
        b'{"tools":{"a":{"calls":1,"seconds":1e99}}}',
        b'{"tools":{"a":{"seconds":1}}}',
        msgspec.json.encode({"tools": {f"t{number}": {"calls": 1, "seconds": 1} for number in range(33)}}),
    ],
)
def test_a_report_that_is_too_large_or_malformed_is_refused_and_finishes_nothing(
    gateway: RunsGateway, body: bytes
) -> None:
    assert gateway.call("agent") == 200
    status, answer = gateway.ask("POST", "/v1/runs/agent/finish", body=body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    page = gateway.ask("GET", "/v1/runs/agent")[1]
    assert (page["status"], page["tools"]) == ("idle", {})


def test_the_reports_of_the_latest_runs_are_kept() -> None:
    reports = ToolReports(max_reports=2)
    for number, run in enumerate(("a", "b", "a", "c")):
        reports.keep("t", run, {"tool": ToolUse(number, 1.0)})
    assert [reports.of("t", run) for run in "abc"] == [{"tool": ToolUse(2, 1.0)}, {}, {"tool": ToolUse(3, 1.0)}]
