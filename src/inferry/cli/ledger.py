"""`inferry ledger`: usage by run, tenant and job."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from msgspec import Struct
from rich.table import Table

from inferry.cli.formats import (
    EMPTY,
    format_age,
    format_count,
    format_ms,
    format_seconds,
    parse_duration,
    safe_text,
)
from inferry.cli.ledger_reports import ReportFilter, ReportName, show_report
from inferry.cli.option_groups import grouped
from inferry.cli.terminal import console
from inferry.domain.ledger import LedgerEntry, LedgerUnusable, Outcome
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.reports import MAX_ROWS, RunBudget
from inferry.ledger.copying import copy_ledger
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.reports import RunSummary, TenantSummary
from inferry.ledger.stores.opening import open_queries

DefaultUrl = Callable[[Path | None], str]
ReportBasis = tuple[Mapping[str, RunBudget], Mapping[str, Price]]
BasisOf = Callable[[Path | None], ReportBasis]
Row = TypeVar("Row")


def url_from_environment(config: Path | None) -> str:
    """Default ledger: INFERRY_LEDGER, or inferry.db in the working directory."""
    if config is not None:
        raise typer.BadParameter("this build reads no configuration file; use --ledger")
    return os.environ.get("INFERRY_LEDGER") or "sqlite:///inferry.db"


class SourceOptions(Struct, frozen=True, kw_only=True):
    """The ledger, and the form of the output."""

    ledger: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ledger URL; default: the configuration's, INFERRY_LEDGER or ./inferry.db."),
    ] = None
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Configuration that names the ledger.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a table.")] = False


class TenantFilter(Struct, frozen=True, kw_only=True):
    """Which tenants and times to report."""

    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None
    since: Annotated[
        float | None, typer.Option(metavar="DURATION", parser=parse_duration, help="Only this recent: 15m, 2h, 7d …")
    ] = None

    @property
    def start_time(self) -> float | None:
        return None if self.since is None else time.time() - self.since


class RunFilter(TenantFilter, frozen=True, kw_only=True):
    """Which runs to report."""

    run: Annotated[str | None, typer.Option(help="Only this run.")] = None
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rows.")] = 20


def ledger_app(default_url: DefaultUrl = url_from_environment, basis_of: BasisOf | None = None) -> typer.Typer:
    """The commands; `default_url(config file or None)` finds the ledger if --ledger is not given, `basis_of` the run
    budgets and prices in the configuration."""
    app = typer.Typer(help="Usage by run, tenant and job.", no_args_is_help=True)

    def open_ledger(source: SourceOptions) -> LedgerQueries:
        try:
            return open_queries(source.ledger or default_url(source.config))
        except LedgerUnusable as error:
            typer.echo(f"inferry ledger: {error}", err=True)
            raise typer.Exit(2) from error

    @app.command()
    @grouped
    def runs(*, source: SourceOptions, only: RunFilter) -> None:
        """Runs, latest first: steps, tokens, GPU time, cost, waits, fraction of time spent in model calls, outcome."""
        with open_ledger(source) as ledger:
            rows = ledger.runs(limit=only.limit, tenant=only.tenant, run=only.run, since=only.start_time)
        _show(rows, _runs_table, as_json=source.as_json, filtered=bool(only.tenant or only.run or only.since))

    @app.command()
    @grouped
    def tenants(*, source: SourceOptions, only: TenantFilter) -> None:
        """Tenants, largest first: runs, jobs, tokens, tokens per GPU-second."""
        with open_ledger(source) as ledger:
            rows = ledger.tenants(tenant=only.tenant, since=only.start_time)
        _show(rows, _tenants_table, as_json=source.as_json, filtered=bool(only.tenant or only.since))

    @app.command()
    @grouped
    def jobs(*, source: SourceOptions, only: RunFilter) -> None:
        """Attempts, latest first."""
        with open_ledger(source) as ledger:
            rows = ledger.jobs(limit=only.limit, tenant=only.tenant, run=only.run, since=only.start_time)
        _show(rows, _jobs_table, as_json=source.as_json, filtered=bool(only.tenant or only.run or only.since))

    @app.command()
    @grouped
    def report(name: ReportName, *, source: SourceOptions, only: ReportFilter) -> None:
        """A report: runs, breaches, tenants, templates, efficiency, compare, composed or month."""
        with open_ledger(source) as ledger:
            configured, prices = ({}, {}) if basis_of is None else basis_of(source.config)
            budgets = {**ledger.run_budgets(), **configured}
            show_report(ledger, name, only, budgets, prices, wants_json=source.as_json)

    app.command("copy")(copy)
    return app


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="URL of the ledger to copy: sqlite:///inferry.db")],
    target: Annotated[str, typer.Argument(metavar="TO", help="URL of an empty database: postgresql://…")],
) -> None:
    """Copy a ledger with keys, tenants, budgets and stored content into an empty database. Stop its gateway before."""
    try:
        counts = copy_ledger(source, target)
    except LedgerUnusable as error:
        typer.echo(f"inferry ledger: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo("Copied " + ", ".join(f"{count} rows of {name}" for name, count in counts.items() if count) + ".")


def _show(rows: Sequence[Row], table: Callable[[Sequence[Row]], Table], *, as_json: bool, filtered: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
    elif not rows:
        typer.echo("No matching rows." if filtered else "The ledger is empty.")
    else:
        console(width=200).print(table(rows))


# --- tables: names fold, so that they can be copied whole; numbers never wrap


def _table(names: Sequence[str], numbers: Sequence[str], last: str | None = None) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, overflow="fold")
    return table


def _runs_table(rows: Sequence[RunSummary]) -> Table:
    costs = ("cost",) if any(row.cost_nanos is not None for row in rows) else ()
    numbers = ("steps", "tries", "in", "cached", "out", "GPU", *costs, "wait", "took", "model", "ended")
    table = _table(("tenant", "run", "lane"), numbers, "result")
    now = time.time()
    for row in rows:
        table.add_row(
            safe_text(row.tenant),
            safe_text(row.run_id),
            " ".join(row.lanes),
            format_count(row.steps),
            format_count(row.attempts),
            format_count(row.prompt_tokens),
            format_count(row.cached_tokens),
            format_count(row.output_tokens),
            format_seconds(row.gpu_seconds),
            *(() if not costs else (EMPTY if row.cost_nanos is None else f"{row.cost_nanos / NANOS_PER_UNIT:.4g}",)),
            format_ms(row.queue_ms_p50),
            format_seconds(row.ended_at - row.started_at),
            EMPTY if row.active_ratio is None else f"{row.active_ratio:.0%}",
            format_age(row.ended_at, now),
            _result(row),
        )
    return table


def _tenants_table(rows: Sequence[TenantSummary]) -> Table:
    numbers = ("runs", "jobs", "in", "cached", "out", "GPU", "tokens/GPU-s", "wait", "batch", "failed", "cancelled")
    table = _table(("tenant",), numbers)
    for row in rows:
        table.add_row(
            safe_text(row.tenant),
            format_count(row.runs),
            format_count(row.jobs),
            format_count(row.prompt_tokens),
            format_count(row.cached_tokens),
            format_count(row.output_tokens),
            format_seconds(row.gpu_seconds),
            format_count(row.tokens_per_gpu_second),
            format_ms(row.queue_ms_mean),
            EMPTY if row.batch_size_mean is None else f"{row.batch_size_mean:.1f}",
            format_count(row.failed + row.expired),
            format_count(row.cancelled),
        )
    return table


def _jobs_table(rows: Sequence[LedgerEntry]) -> Table:
    numbers = ("try", "in", "cached", "out", "wait", "first", "total", "ended")
    table = _table(("tenant", "run", "step", "job", "lane"), numbers, "result")
    now = time.time()
    for row in rows:
        table.add_row(
            safe_text(row.tenant),
            safe_text(row.run_id),
            safe_text(row.step_id),
            safe_text(row.job_id),
            row.lane,
            str(row.attempt),
            format_count(row.prompt_tokens),
            format_count(row.cached_tokens),
            format_count(row.output_tokens),
            format_ms(row.queue_ms),
            format_ms(row.first_token_ms),
            format_ms(row.total_ms),
            format_age(row.ended_at, now),
            safe_text((row.finish or "done") if row.outcome is Outcome.DONE else (row.error_code or row.outcome.value)),
        )
    return table


def _result(row: RunSummary) -> str:
    parts = [f"{count} {name}" for name in ("failed", "cancelled", "expired") if (count := getattr(row, name))]
    return ", ".join(parts) or "done"


if __name__ == "__main__":
    ledger_app()()
