"""Reports of the ledger: their figures equal those computed in Python."""

import csv
import io
from collections.abc import Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from inferry.domain.errors import ReportTimeout
from inferry.domain.ledger import GpuTimeRow, Outcome, RetentionPolicy
from inferry.domain.reports import REPORTS, Report, ReportQuery, RunBudget, as_csv, as_json, default_period
from inferry.domain.tenants import Limits, Tenant
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.report_totals import MONTH_S
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.opening import open_queries
from inferry.ledger.stores.retention import RetentionStore
from inferry.ledger.stores.tenants import TenantStore
from ledger.builders import an_entry

MONDAY = 1_762_732_800.0  # 2025-11-10T00:00Z
DAY = 86_400.0


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[AttemptStore]:
    with closing(AttemptStore(ledger_url)) as ledger:
        yield ledger


@pytest.fixture
def queries(ledger_url: str, ledger: AttemptStore) -> Iterator[LedgerQueries]:
    with open_queries(ledger_url) as queries:
        yield queries


def rows(report: Report) -> list[dict[str, object]]:
    found: list[dict[str, object]] = as_json(report)["rows"]
    return found


def a_period(since: float = MONDAY, until: float = MONDAY + 7 * DAY, **more: object) -> ReportQuery:
    return ReportQuery(since=since, until=until, **more)  # type: ignore[arg-type]


def test_every_report_works_on_an_empty_ledger(queries: LedgerQueries) -> None:
    for name in REPORTS:
        report = queries.report(name, a_period())
        assert (report.name, report.rows, report.is_truncated) == (name, (), False)
        assert report.columns
        assert as_csv(report).count("\r\n") == 1


def test_runs_are_set_against_the_budget_of_their_tenant(ledger: AttemptStore, queries: LedgerQueries) -> None:
    # Two calls of 1 s each with 3 s between them.
    for number, ended_at in enumerate((MONDAY + 1, MONDAY + 5)):
        ledger.append(
            [
                an_entry(
                    number,
                    ended_at=ended_at,
                    total_ms=1000,
                    queue_ms=100.0 * (number + 1),
                    prompt_tokens=300,
                    output_tokens=100,
                    cost_nanos=150_000_000,
                )
            ]
        )
    ledger.append([an_entry(9, tenant="other", run_id="free", ended_at=MONDAY + 2, total_ms=10)])
    budgets = {"acme": RunBudget(money=0.6), "nobody": RunBudget(tokens=5)}
    one, free = rows(queries.report("runs", a_period(budgets=budgets)))
    assert (one["run"], one["cost"], one["money_budget"], one["budget_used"]) == ("run-1", 0.3, 0.6, 0.5)
    assert (one["tokens"], one["calls"], one["seconds"]) == (800, 2, 5.0)
    assert one["model_active"] == pytest.approx(2 / 5)
    assert one["tool_seconds"] == pytest.approx(3.0)
    assert (one["wait_p50_ms"], one["wait_max_ms"]) == (150.0, 200.0)
    assert (free["run"], free["cost"], free["budget_used"]) == ("free", None, None)
    (only,) = rows(queries.report("runs", a_period(tenant="other", budget=0.5)))
    assert (only["run"], only["money_budget"], only["budget_used"]) == ("free", 0.5, None)


def test_a_run_with_its_sub_runs_is_one_run_against_the_budget(ledger: AttemptStore, queries: LedgerQueries) -> None:
    of = {"prompt_tokens": 9_000, "output_tokens": 1_000, "total_ms": 1000, "cost_nanos": 10**8}
    family = [("root", None), *((f"sub-{n}", "root") for n in range(4)), ("grandchild", "sub-3")]
    ledger.append(
        [
            an_entry(number, run_id=run, parent_run=parent, ended_at=MONDAY + 2 * number + 1, **of)
            for number, (run, parent) in enumerate(family)
        ]
    )
    ledger.append(
        [
            # A sub-run of a run without calls, a run of another tenant with the same id, and a call before the period.
            an_entry(20, run_id="orphan", parent_run="silent", ended_at=MONDAY + 30, **of),
            an_entry(21, tenant="other", run_id="sub-1", ended_at=MONDAY + 40, **of),
            an_entry(22, run_id="sub-2", parent_run="root", ended_at=MONDAY - 5, **of),
        ]
    )
    asked = a_period(budgets={"acme": RunBudget(tokens=50_000)})
    other, silent, root = rows(queries.report("runs", asked))
    assert (other["run"], other["tokens"]) == ("sub-1", 10_000)
    assert (silent["run"], silent["tokens"], silent["budget_used"]) == ("silent", 10_000, 0.2)
    assert (root["run"], root["tokens"], root["calls"], root["budget_used"]) == ("root", 70_000, 7, 1.4)
    assert (root["ended_at"], root["seconds"]) == (MONDAY + 11, 17.0)
    assert root["tool_seconds"] == pytest.approx(17.0 - 7.0)
    (week,) = rows(queries.report("breaches", asked))
    assert week.items() >= {"runs": 3, "over_budget": 1, "breached": 1}.items()
    assert week["cost_per_run"] == pytest.approx(0.8 / 3)
    (tenant, _) = rows(queries.report("tenants", asked))
    assert (tenant["tenant"], tenant["runs"], tenant["cost_per_run"]) == ("acme", 2, pytest.approx(0.35))
    assert [row["runs"] for row in rows(queries.report("templates", asked))] == [2, 1]
    assert {one.tenant: one.runs for one in queries.tenants(since=MONDAY)} == {"acme": 2, "other": 1}


def test_breaches_are_counted_per_week(ledger: AttemptStore, queries: LedgerQueries) -> None:
    for number in range(10):
        is_dear = number < 3
        ledger.append(
            [an_entry(number, run_id=f"a{number}", ended_at=MONDAY + number * 3600, cost_nanos=10**9 if is_dear else 1)]
        )
    stopped = {"outcome": Outcome.DONE, "error_code": "run_budget_exhausted", "ended_at": MONDAY + 8 * DAY}
    ledger.append([an_entry(20, run_id="b", **stopped), an_entry(21, run_id="b", **stopped)])
    ledger.append([an_entry(22, run_id="c", ended_at=MONDAY + 14 * DAY - 1)])
    ledger.append([an_entry(23, run_id="later", ended_at=MONDAY + 14 * DAY)])
    asked = a_period(until=MONDAY + 14 * DAY, budget=0.5)
    second, first = rows(queries.report("breaches", asked))
    assert first.items() >= {"week": "2025-11-10", "runs": 10, "over_budget": 3, "stopped": 0, "breached": 3}.items()
    assert first["breach_ratio"] == pytest.approx(0.3)
    assert second.items() >= {"week": "2025-11-17", "runs": 2, "stopped": 1, "calls_stopped": 2}.items()
    by_tenant = a_period(until=MONDAY + 14 * DAY, budgets={"acme": RunBudget(money=2.0)})
    assert [row["over_budget"] for row in rows(queries.report("breaches", by_tenant))] == [0, 0]
    assert "No run budget" in queries.report("breaches", a_period()).notes[0]


def test_tenants_and_templates_are_ordered_by_cost_then_tokens(ledger: AttemptStore, queries: LedgerQueries) -> None:
    of = {"ended_at": MONDAY + 1, "prompt_tokens": 100, "cached_tokens": 50, "output_tokens": 100}
    ledger.append(
        [
            an_entry(1, tenant="a", cost_nanos=10**9, gpu_seconds=2.0, attained=True, template_id="t", **of),
            an_entry(2, tenant="a", cost_nanos=10**9, gpu_seconds=1.0, attained=False, template_id="t", **of),
            an_entry(3, tenant="b", **of),
            an_entry(4, tenant="b", **of),
            an_entry(5, tenant="b", template_id="=cmd", **of),
            # An answer that another job computed.
            an_entry(6, tenant="c", cost_nanos=0, shared_with="job-1", ended_at=MONDAY + 1),
        ]
    )
    dear, many, shared = rows(queries.report("tenants", a_period()))
    assert (dear["tenant"], dear["cost"], dear["calls"], dear["attainment"]) == ("a", 2.0, 2, 0.5)
    assert dear["tokens_per_gpu_second"] == pytest.approx(2 * 150 / 3)
    assert (many["tenant"], many["tokens"], many["cost"]) == ("b", 600, None)
    assert (shared["tenant"], shared["calls"], shared["tokens"], shared["cost"]) == ("c", 1, 0, 0.0)
    found = rows(queries.report("templates", a_period()))
    assert [(row["tenant"], row["template"]) for row in found[:2]] == [("a", "t"), ("b", None)]
    assert (found[0]["cached"], found[0]["cost_per_call"]) == (0.5, 1.0)
    limited = queries.report("templates", a_period(limit=1))
    assert (len(limited.rows), limited.is_truncated) == (1, True)


def test_gpu_time_is_split_into_work_waste_idle_and_unattributed(
    ledger_url: str, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    parts = {"work": 40.0, "cancelled": 5.0, "preempted": 3.0, "recomputed": 2.0, "idle": 45.0, "unattributed": 5.0}
    rows_of = [
        GpuTimeRow(worker="w", started_at=MONDAY, kind=kind, ended_at=MONDAY + 100, gpu_seconds=seconds)
        for kind, seconds in parts.items()
    ]
    ledger.append_gpu_time(rows_of)
    of = {"ended_at": MONDAY + 50, "prompt_tokens": 1000, "cached_tokens": 200, "output_tokens": 400}
    ledger.append([an_entry(1, worker="w", gpu_seconds=40.0, gpu_estimated=True, **of), an_entry(2, worker="v", **of)])
    v, w = rows(queries.report("efficiency", a_period()))
    assert (v["worker"], v["tokens_per_gpu_second"], v["utilisation"], v["estimated"]) == ("v", None, None, "no")
    assert w["tokens_per_gpu_second"] == pytest.approx(1200 / 40)
    assert (w["total_gpu_seconds"], w["utilisation"], w["wasted_gpu_seconds"]) == (100.0, 0.55, 10.0)
    assert (w["idle_gpu_seconds"], w["unattributed_gpu_seconds"], w["estimated"]) == (45.0, 5.0, "yes")
    (own,) = [row for row in rows(queries.report("efficiency", a_period(tenant="acme"))) if row["worker"] == "w"]
    assert (own["work_gpu_seconds"], own["utilisation"]) == (40.0, None)


def test_two_periods_are_compared_lane_by_lane(ledger: AttemptStore, queries: LedgerQueries) -> None:
    for week, waits in ((0, range(1, 101)), (1, range(2, 102))):
        for number, wait in enumerate(waits):
            ledger.append(
                [
                    an_entry(
                        f"{week}-{number}",
                        lane="P0",
                        ended_at=MONDAY + week * 7 * DAY + number,
                        queue_ms=float(wait),
                        first_token_ms=2.0 * wait,
                        attained=number < (50 if week == 0 else 75),
                        prompt_tokens=10,
                        cost_nanos=10**6,
                    )
                ]
            )
    ledger.append([an_entry("batch", lane="P2", ended_at=MONDAY + 8 * DAY)])
    report = queries.report("compare", a_period(MONDAY + 7 * DAY, MONDAY + 14 * DAY))
    table = {(row["lane"], row["figure"]): row for row in rows(report)}
    assert table["P0", "wait_p50_ms"].items() >= {"before": 50.0, "after": 51.0, "unit": "ms"}.items()
    assert (table["P0", "wait_p95_ms"]["before"], table["P0", "wait_p95_ms"]["after"]) == (95.0, 96.0)
    assert table["P0", "ttft_p95_ms"]["after"] == 192.0
    assert [table["P0", name]["after"] for name in ("wait_p999_ms", "wait_max_ms")] == [101.0, 101.0]
    assert [table["P0", name]["after"] for name in ("ttft_p999_ms", "ttft_max_ms")] == [202.0, 202.0]
    assert table["P0", "attainment"]["change_percent"] == pytest.approx(50.0)
    assert (table["all", "calls"]["before"], table["all", "calls"]["after"]) == (100, 101)
    assert (table["P2", "calls"]["before"], table["P2", "calls"]["change_percent"]) == (None, None)
    assert table["P0", "cost"]["before"] == pytest.approx(0.1)
    given = a_period(MONDAY + 7 * DAY, MONDAY + 14 * DAY, before_since=MONDAY, before_until=MONDAY + DAY)
    assert "differ in length" in queries.report("compare", given).notes[-1]


def test_two_periods_are_compared_by_the_rules_of_the_other_reports(
    ledger: AttemptStore, queries: LedgerQueries
) -> None:
    of = {"worker": "w", "prompt_tokens": 1000, "cached_tokens": 200, "output_tokens": 400}
    for week, (cost_nanos, gpu_seconds, idle, breaches) in enumerate(
        [(2 * 10**9, 40.0, 75.0, 1), (10**9, 20.0, 50.0, 3)]
    ):
        monday = MONDAY + week * 7 * DAY
        ledger.append(
            [
                an_entry(
                    f"{week}-{number}",
                    run_id=f"run-{week}-{number}",
                    ended_at=monday + number * DAY,
                    total_ms=0,
                    lane=f"P{number % 2}",
                    error_code="run_budget_exhausted" if number < breaches else None,
                    cost_nanos=cost_nanos // 4,
                    gpu_seconds=gpu_seconds / 4,
                    **of,
                )
                for number in range(4)
            ]
        )
        ledger.append_gpu_time(
            [
                GpuTimeRow(worker="w", started_at=monday, kind=kind, ended_at=monday + 100, gpu_seconds=of_kind)
                for kind, of_kind in (("idle", idle), ("work", 100.0 - idle))
            ]
        )
    asked = a_period(MONDAY + 7 * DAY, MONDAY + 14 * DAY)
    table = {(row["lane"], row["figure"]): row for row in rows(queries.report("compare", asked))}

    def both(lane: str, figure: str) -> tuple[object, object]:
        return table[lane, figure]["before"], table[lane, figure]["after"]

    (month,) = rows(queries.report("month", asked))
    (worker,) = rows(queries.report("efficiency", asked))
    (week_of,) = rows(queries.report("breaches", asked))
    assert both("all", "cost_per_month") == pytest.approx((2.0 * MONTH_S / (7 * DAY), month["cost_per_month"]))
    assert both("all", "tokens_per_gpu_second") == pytest.approx((4 * 1200 / 40, worker["tokens_per_gpu_second"]))
    assert both("all", "utilisation") == pytest.approx((0.25, worker["utilisation"]))
    assert both("all", "breaches") == (1, week_of["breached"]) == (1, 3)
    assert both("P1", "cost_per_month") == pytest.approx((MONTH_S / (7 * DAY), 0.5 * MONTH_S / (7 * DAY)))
    assert both("P1", "tokens_per_gpu_second") == pytest.approx((120.0, 240.0))
    assert ("P1", "utilisation") not in table
    assert ("P1", "breaches") not in table
    own = {row["figure"]: row for row in rows(queries.report("compare", replace(asked, tenant="acme")))}
    assert (own["utilisation"]["after"], own["breaches"]["after"]) == (None, 3)


def test_the_cost_of_a_month_says_what_it_is_based_on(ledger: AttemptStore, queries: LedgerQueries) -> None:
    end = MONDAY + 3 * DAY
    for number in range(3):
        ledger.append(
            [an_entry(number, ended_at=MONDAY + number * DAY, prompt_tokens=100, cost_nanos=10**9, model="m")]
        )
    report = queries.report("month", a_period(MONDAY - 30 * DAY, end))
    (row,) = rows(report)
    assert (row["tenant"], row["model"], row["cost"]) == ("acme", "m", 3.0)
    assert row["cost_per_month"] == pytest.approx(3.0 * MONTH_S / (3 * DAY))
    assert report.notes == ("Based on 3.0 days of data; 30.44 per month in all.",)
    assert "Uncertain" in queries.report("month", a_period(end - 2 * DAY, end - 1.5 * DAY)).notes[-1]


def test_a_cell_that_begins_like_a_formula_is_text_in_a_spreadsheet(
    ledger: AttemptStore, queries: LedgerQueries
) -> None:
    names = ["=1+1", "+1", "-1", "@sum", "plain", "a=b", 'quo"te', "two\nlines", "a;=1+1"]
    for number, name in enumerate(names):
        ledger.append([an_entry(number, run_id=name, ended_at=MONDAY + number)])
    text = as_csv(queries.report("runs", a_period()))
    shown = {row["run"] for row in csv.DictReader(io.StringIO(text, newline=""))}
    assert shown == {"'=1+1", "'+1", "'-1", "'@sum", "plain", "a=b", 'quo"te', "two\nlines", "a;'=1+1"}
    # Numbers stay numbers: a negative change is no formula.
    assert "2025-11-10T00:00:07+00:00" in text


def test_a_report_that_takes_too_long_is_stopped(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry(number, ended_at=MONDAY + number) for number in range(5000)])
    with pytest.raises(ReportTimeout):
        queries.report("compare", a_period(), time_limit_s=-1.0)
    assert queries.report("compare", a_period()).rows


def test_attempts_that_were_rolled_up_count_in_the_sums(
    ledger_url: str, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    of = {"prompt_tokens": 100, "output_tokens": 100, "cost_nanos": 10**9, "model": "m", "queue_ms": 10.0}
    ledger.append([an_entry(number, ended_at=MONDAY + number * DAY, attained=True, **of) for number in range(20)])
    row = GpuTimeRow(worker="w", started_at=MONDAY, kind="work", ended_at=MONDAY + 10, gpu_seconds=10.0)
    ledger.append_gpu_time([row])
    asked = a_period(MONDAY - DAY, MONDAY + 30 * DAY)
    names = ("tenants", "month", "efficiency")
    whole = {name: queries.report(name, asked) for name in names}
    with closing(LedgerDatabase(ledger_url)) as database:
        policy = RetentionPolicy(attempts_s=DAY, gpu_time_s=DAY, rollups_s=None)
        store = RetentionStore(database, policy)
        while store.sweep(MONDAY + 25 * DAY, 1000):
            pass
    assert queries.jobs() == []
    for name in names:
        assert [tuple(row) for row in queries.report(name, asked).rows] == [tuple(row) for row in whole[name].rows]
    assert "only in roll-ups" in queries.report("runs", asked).notes[0]


def test_budgets_of_stored_tenants_are_known(ledger_url: str, ledger: AttemptStore, queries: LedgerQueries) -> None:
    with closing(TenantStore(ledger_url)) as store:
        store.put_tenant(Tenant(name="acme", limits=Limits(run_money_ceiling=0.12, run_token_ceiling=9)))
        store.put_tenant(Tenant(name="free"))
    assert queries.run_budgets() == {"acme": RunBudget(9, 0.12)}


def test_the_default_period_is_a_week_and_twelve_of_them_for_breaches() -> None:
    assert default_period("runs", MONDAY) == (MONDAY - 7 * DAY, MONDAY)
    assert default_period("breaches", MONDAY) == (MONDAY - 84 * DAY, MONDAY)
    assert default_period("runs", MONDAY, until=MONDAY - DAY) == (MONDAY - 8 * DAY, MONDAY - DAY)
