"""Reports of the ledger: what can be asked, and the table that answers."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from msgspec import Struct

from inferry.domain.prices import Price
from inferry.domain.tenants import Tenant

Kind = Literal["text", "count", "number", "ratio", "percent", "money", "ms", "seconds", "time"]
Cell = str | int | float | None
_FORMULA = re.compile(r"(?:\A|(?<=[;\t\r\n]))(?=[=+\-@\t\r\n])")
"""Begins of cells that are formulas. Some spreadsheets split at `;`, in quotes too."""

DEFAULT_PERIOD_S = 7 * 86_400.0
DEFAULT_WEEKS = 12
MAX_PERIOD_S = 731 * 86_400.0
DEFAULT_ROWS = 100
MAX_ROWS = 10_000
MAX_BUDGET = 1e9
TIME_LIMIT_S = 20.0
"""Longest time that the database works on one report, in seconds."""

REPORTS: dict[str, str] = {
    "runs": "Runs with sub-runs, latest first: cost and tokens against the budget, active ratio, tool time and waits.",
    "breaches": "Per week (Monday, UTC): runs over their budget, and runs with a call refused or stopped by a budget.",
    "tenants": "Tenants by cost: runs, calls, tokens, cost, waits and attainment.",
    "templates": "Templates by cost: runs, calls, tokens, cost and the cached part of their prompts.",
    "efficiency": "Workers: tokens per GPU-second, utilisation, and GPU time that was idle, wasted or unattributed.",
    "compare": "Two periods side by side, by lane: cost, waits, attainment, GPU efficiency, breaches and their change.",
    "composed": "Composed models: models that answered, share of the small model, agreement, and what was saved.",
    "month": "Cost per month at the rate of the period, by tenant and model.",
}
"""The reports by name, with what they show."""


class RunBudget(Struct, frozen=True):
    """What a run of a tenant may use; None is no limit. Money is in the currency of the prices."""

    tokens: int | None = None
    money: float | None = None


class ReportQuery(Struct, frozen=True, kw_only=True):
    """A period `since` to `until` (Unix seconds, the end excluded), and which rows.

    `before_since` and `before_until` are the earlier period of `compare`. `budget` is a budget per run in money that
    replaces those in `budgets`, which are the tenants' own. `prices` are those of the configuration, by model.
    """

    since: float
    until: float
    tenant: str | None = None
    limit: int = DEFAULT_ROWS
    before_since: float | None = None
    before_until: float | None = None
    budget: float | None = None
    budgets: Mapping[str, RunBudget] = {}
    prices: Mapping[str, Price] = {}


class Column(Struct, frozen=True):
    """One column. Ratios are fractions of 1; times are Unix seconds."""

    name: str
    kind: Kind
    help: str


class Report(Struct, frozen=True, kw_only=True):
    """A table. `notes` say what the figures are based on; `is_truncated`: there are more rows than asked for."""

    name: str
    since: float
    until: float
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    is_truncated: bool = False


class ReportReader(Protocol):
    """Read side of a ledger that makes reports. Blocks; used by one thread at a time, and closed after use."""

    def report(self, name: str, query: ReportQuery) -> Report: ...

    def close(self) -> None: ...


def run_budgets(tenants: Iterable[Tenant]) -> dict[str, RunBudget]:
    """The run budgets of the tenants that have one."""
    limits = {tenant.name: tenant.limits for tenant in tenants}
    return {
        name: RunBudget(one.run_token_ceiling, one.run_money_ceiling)
        for name, one in limits.items()
        if one.run_token_ceiling is not None or one.run_money_ceiling is not None
    }


def default_period(
    name: str, now: float, since: float | None = None, until: float | None = None
) -> tuple[float, float]:
    """The period of a report, where its begin or end is not given."""
    end = now if until is None else until
    length_s = DEFAULT_WEEKS * 7 * 86_400.0 if name == "breaches" else DEFAULT_PERIOD_S
    return (end - length_s if since is None else since), end


def is_period(since: float, until: float) -> bool:
    """Whether a report can be of this period."""
    return since >= 0 and 0 < until - since <= MAX_PERIOD_S


def as_json(report: Report) -> dict[str, Any]:
    """The report as a JSON value, each row an object."""
    names = [column.name for column in report.columns]
    return {
        "report": report.name,
        "since": report.since,
        "until": report.until,
        "columns": report.columns,
        "rows": [dict(zip(names, row, strict=True)) for row in report.rows],
        "notes": report.notes,
        "truncated": report.is_truncated,
    }


def as_csv(report: Report) -> str:
    """The rows as CSV with a header line. Times are written in ISO 8601, UTC."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow([column.name for column in report.columns])
    for row in report.rows:
        writer.writerow([_csv_cell(cell, column.kind) for cell, column in zip(row, report.columns, strict=True)])
    return text.getvalue()


def _csv_cell(cell: Cell, kind: Kind) -> Cell:
    if isinstance(cell, str):
        # Clients choose ids: a spreadsheet would run a cell that begins like a formula.
        return _FORMULA.sub("'", cell)
    if kind == "time" and cell is not None:
        return datetime.fromtimestamp(cell, UTC).isoformat(timespec="seconds")
    return cell
