"""`/admin/reports`: for operators only, as JSON and CSV."""

import csv
import io
from collections.abc import Iterator
from typing import Any

import pytest

from inferry.domain.reports import REPORTS
from support.quiet_machine import a_quiet_machine
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import CHAT, TenantGateway, bearer

CANARY = "canary-a81f-not-to-be-seen"
CALL = {"model": "m", "messages": [{"role": "user", "content": CANARY}]}
TENANTS = {"acme": {"run_money_ceiling": 0.5, "run_token_ceiling": 100_000}}
CONFIG: dict[str, Any] = {"tenants": TENANTS, "prices": {"m": {"input": 1.0, "output": 2.0}}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantGateway]:
    directory = tmp_path_factory.mktemp("reports")
    with a_quiet_machine(), TenantGateway(directory, lambda: ([ScriptedWorker()], {}), CONFIG) as gateway:
        key = gateway.key("acme")
        for run in ("=one", "two"):
            headers = bearer(key, x_inferry_run_id=run, x_inferry_template_id="<b>t</b>")
            assert gateway.call("POST", CHAT, CALL, headers).status == 200
        assert gateway.service.gateway._recorder.flush(60)
        yield gateway


def test_the_reports_are_listed(gateway: TenantGateway) -> None:
    answer = gateway.as_admin("GET", "/admin/reports")
    assert answer.status == 200
    assert [one["name"] for one in answer.json["reports"]] == list(REPORTS)


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_is_served_as_json_and_csv_without_prompts(gateway: TenantGateway, name: str) -> None:
    answer = gateway.as_admin("GET", f"/admin/reports/{name}?limit=10")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["cache-control"] == "no-store"
    table = gateway.as_admin("GET", f"/admin/reports/{name}?format=csv")
    assert (table.status, table.headers["content-type"]) == (200, "text/csv; charset=utf-8")
    assert f'filename="inferry-{name}.csv"' in table.headers["content-disposition"]
    columns = [column["name"] for column in answer.json["columns"]]
    assert next(csv.reader(io.StringIO(table.body.decode()))) == columns
    for text in (answer.body, table.body):
        assert CANARY.encode() not in text


def test_runs_show_the_budget_of_the_tenant(gateway: TenantGateway) -> None:
    rows = gateway.as_admin("GET", "/admin/reports/runs?tenant=acme").json["rows"]
    assert {row["run"] for row in rows} == {"=one", "two"}
    assert {(row["money_budget"], row["token_budget"]) for row in rows} == {(0.5, 100_000)}
    assert all(0 < row["budget_used"] < 1 for row in rows)
    assert "'=one" in gateway.as_admin("GET", "/admin/reports/runs?format=csv").body.decode()
    assert gateway.as_admin("GET", "/admin/reports/runs?tenant=nobody").json["rows"] == []
    (breaches,) = gateway.as_admin("GET", "/admin/reports/breaches?budget=0.0000001").json["rows"]
    assert (breaches["runs"], breaches["over_budget"]) == (2, 2)


def test_a_run_refused_by_its_budget_is_a_breach(gateway: TenantGateway) -> None:
    gateway.as_admin("PUT", "/admin/tenants/tight", {"run_token_ceiling": 1})
    key = gateway.key("tight")
    for _ in range(3):
        answer = gateway.call("POST", CHAT, CALL, bearer(key, x_inferry_run_id="over"))
        assert (answer.status, answer.code) == (402, "run_budget_exhausted")
    assert gateway.service.gateway._recorder.flush(60)
    (week,) = gateway.as_admin("GET", "/admin/reports/breaches?tenant=tight").json["rows"]
    assert (week["runs"], week["stopped"], week["breach_ratio"], week["calls_stopped"]) == (1, 1, 1.0, 1)


@pytest.mark.parametrize(
    "query",
    [
        *("since=never", "since=nan", "until=1e99", "since=2026-01-02&until=2026-01-01", "since=0", "limit=0"),
        *("limit=10001", "limit=x", "budget=-1", "format=xml", "tenant=", "colour=red", "before_since=9999999999"),
    ],
)
def test_a_bad_query_is_refused(gateway: TenantGateway, query: str) -> None:
    answer = gateway.as_admin("GET", f"/admin/reports/compare?{query}")
    assert (answer.status, answer.code) == (400, "invalid_request")


def test_times_may_be_iso_dates(gateway: TenantGateway) -> None:
    answer = gateway.as_admin("GET", "/admin/reports/tenants?since=2026-01-01&until=2026-01-02T12:00Z")
    assert (answer.json["since"], answer.json["until"]) == (1_767_225_600.0, 1_767_355_200.0)


def test_reports_need_the_admin_key(gateway: TenantGateway) -> None:
    for path in ("/admin/reports", "/admin/reports/runs", "/admin/diagnosis"):
        answer = gateway.call("GET", path, headers=bearer(gateway.key("acme")))
        assert (answer.status, answer.code) == (403, "admin_only")
    answer = gateway.as_admin("GET", "/admin/reports/nothing")
    assert (answer.status, answer.code) == (404, "not_found")
    assert gateway.as_admin("POST", "/admin/reports/runs").status == 405


def test_a_ledger_in_memory_has_no_reports(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = {"ledger": "sqlite:///:memory:"}
    directory = tmp_path_factory.mktemp("memory")
    with TenantGateway(directory, lambda: ([ScriptedWorker()], {}), config) as gateway:
        answer = gateway.as_admin("GET", "/admin/reports/runs")
        assert (answer.status, answer.code) == (503, "ledger_unavailable")
        assert gateway.as_admin("GET", "/admin/diagnosis").json["verdict"] == "not_enough_data"


def test_the_diagnosis_has_figures_and_no_prompts(gateway: TenantGateway) -> None:
    answer = gateway.as_admin("GET", "/admin/diagnosis?window_s=60")
    assert answer.status == 200
    assert CANARY.encode() not in answer.body
    found = answer.json
    assert (found["verdict"], found["window_s"], found["alerts"]) == ("not_enough_data", 60.0, 0)
    assert [lane["lane"] for lane in found["lanes"]] == ["P0", "P1", "P2"]
    assert [worker["worker"] for worker in found["workers"]] == ["scripted"]
    assert found["tenants"][0]["tenant"] == "acme"
    for query in ("window_s=1", "window_s=901", "window_s=x", "colour=red"):
        assert gateway.as_admin("GET", f"/admin/diagnosis?{query}").status == 400
