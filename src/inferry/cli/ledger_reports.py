"""`inferry ledger report`: a report as a table, JSON or CSV."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from inferry.cli.formats import EMPTY, format_count, format_ms, format_seconds, parse_duration, safe_text
from inferry.cli.terminal import console, fail
from inferry.domain.errors import ReportTimeout
from inferry.domain.prices import Price
from inferry.domain.reports import (
    MAX_BUDGET,
    MAX_PERIOD_S,
    MAX_ROWS,
    REPORTS,
    Cell,
    Kind,
    Report,
    ReportQuery,
    RunBudget,
    as_csv,
    as_json,
    default_period,
    is_period,
)
from inferry.ledger.queries import LedgerQueries

ReportName = Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(REPORTS)}.")]
_TERMINAL_ROWS = 50


def _ago(name: str, help_text: str) -> object:
    return typer.Option(f"--{name}", metavar="DURATION", parser=parse_duration, help=help_text)


class ReportFilter(Struct, frozen=True, kw_only=True):
    """Period, rows and form of a report. Durations are counted back from now."""

    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None
    since: Annotated[
        float | None, _ago("since", "Begin of the period: 15m, 2h, 7d; default 7d, or 12 weeks for breaches.")
    ] = None
    until: Annotated[float | None, _ago("until", "End of the period; default: now.")] = None
    before_since: Annotated[
        float | None, _ago("before-since", "compare: begin of the earlier period; default: as long as the later one.")
    ] = None
    before_until: Annotated[
        float | None, _ago("before-until", "compare: end of the earlier period; default: begin of the later one.")
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(min=0, max=MAX_BUDGET, help="Budget per run in money, instead of the tenants' run_money_ceiling."),
    ] = None
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rows.")] = _TERMINAL_ROWS
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV instead of a table.")] = False

    def query(
        self, name: str, budgets: Mapping[str, RunBudget], prices: Mapping[str, Price], now: float
    ) -> ReportQuery:
        def before(seconds: float | None) -> float | None:
            return None if seconds is None else now - seconds

        since, until = default_period(name, now, before(self.since), before(self.until))
        return ReportQuery(
            since=since,
            until=until,
            tenant=self.tenant,
            limit=self.limit,
            before_since=before(self.before_since),
            before_until=before(self.before_until),
            budget=self.budget,
            budgets=budgets,
            prices=prices,
        )


def show_report(
    ledger: LedgerQueries,
    name: str,
    only: ReportFilter,
    budgets: Mapping[str, RunBudget],
    prices: Mapping[str, Price],
    *,
    wants_json: bool,
) -> None:
    """Print the report. Exits where there is no such report, or it takes too long."""
    if name not in REPORTS:
        fail(f"unknown report; there are {', '.join(REPORTS)}")
    query = only.query(name, budgets, prices, time.time())
    periods = [(query.since, query.until)]
    if query.before_since is not None:
        periods.append((query.before_since, query.since if query.before_until is None else query.before_until))
    if not all(is_period(*one) for one in periods):
        fail(f"the period must begin before it ends and last at most {MAX_PERIOD_S / 86_400:.0f} days")
    try:
        report = ledger.report(name, query)
    except ReportTimeout as error:
        fail(error.message, status=1)
    if only.as_csv:
        typer.echo(as_csv(report), nl=False)
    elif wants_json:
        typer.echo(msgspec.json.encode(as_json(report)).decode())
    else:
        _print(report)


def _print(report: Report) -> None:
    out = console(width=200)
    if not report.rows:
        typer.echo("No matching rows.")
    else:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        for column in report.columns:
            is_text = column.kind == "text"
            table.add_column(
                column.name.replace("_", " "),
                justify="left" if is_text else "right",
                no_wrap=not is_text,
                overflow="fold",
            )
        for row in report.rows:
            table.add_row(*(_shown(cell, column.kind) for cell, column in zip(row, report.columns, strict=True)))
        out.print(table)
    for note in (*report.notes, *(("There are more rows; see --limit.",) if report.is_truncated else ())):
        typer.echo(note)


def _shown(cell: Cell, kind: Kind) -> Text:
    if isinstance(cell, str):
        return safe_text(cell)
    if cell is None:
        return Text(EMPTY)
    match kind:
        case "ratio":
            return Text(f"{cell:.0%}")
        case "percent":
            return Text(f"{cell:+.1f}%")
        case "money":
            return Text(f"{cell:.4g}" if cell < 1000 else f"{cell:,.0f}")
        case "ms":
            return Text(format_ms(cell))
        case "seconds":
            return Text(format_seconds(cell))
        case "time":
            return Text(datetime.fromtimestamp(cell, UTC).strftime("%Y-%m-%d %H:%M"))
        case "number":
            return Text(f"{cell:.4g}" if abs(cell) < 1000 else format_count(cell))
        case _:
            return Text(format_count(cell))
