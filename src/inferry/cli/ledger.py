"""`inferry ledger`: usage by run, tenant and job."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from inferry.cli.option_groups import grouped
from inferry.cli.terminal import console
from inferry.domain.ledger import LedgerEntry, LedgerUnusable, Outcome
from inferry.domain.tenants import NANOS_PER_UNIT
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.reports import RunSummary, TenantSummary
from inferry.ledger.stores.opening import open_queries

DefaultUrl = Callable[[Path | None], str]
Row = TypeVar("Row")

_EMPTY = "–"  # noqa: RUF001 - shown for a missing number
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def url_from_environment(config: Path | None) -> str:
    """Default ledger: INFERRY_LEDGER, or inferry.db in the working directory."""
    if config is not None:
        raise typer.BadParameter("this build reads no configuration file; use --db")
    return os.environ.get("INFERRY_LEDGER") or "sqlite:///inferry.db"


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 90s, 15m, 2h, 7d, 1w."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 90s, 15m, 2h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


class SourceOptions(Struct, frozen=True, kw_only=True):
    """The ledger, and the form of the output."""

    db: Annotated[
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
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 20


def ledger_app(default_url: DefaultUrl = url_from_environment) -> typer.Typer:
    """The commands; `default_url(config file or None)` finds the ledger if --db is not given."""
    app = typer.Typer(help="Usage by run, tenant and job.", no_args_is_help=True)

    def open_ledger(source: SourceOptions) -> LedgerQueries:
        try:
            return open_queries(source.db or default_url(source.config))
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

    return app


def _show(rows: Sequence[Row], table: Callable[[Sequence[Row]], Table], *, as_json: bool, filtered: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
    elif not rows:
        typer.echo("No matching rows." if filtered else "The ledger is empty.")
    else:
        console(width=100).print(table(rows))


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
            _safe_text(row.tenant),
            _safe_text(row.run_id),
            " ".join(row.lanes),
            _format_count(row.steps),
            _format_count(row.attempts),
            _format_count(row.prompt_tokens),
            _format_count(row.cached_tokens),
            _format_count(row.output_tokens),
            _format_seconds(row.gpu_seconds),
            *(() if not costs else (_EMPTY if row.cost_nanos is None else f"{row.cost_nanos / NANOS_PER_UNIT:.4g}",)),
            _format_ms(row.queue_ms_p50),
            _format_seconds(row.ended_at - row.started_at),
            _EMPTY if row.active_ratio is None else f"{row.active_ratio:.0%}",
            _format_age(row.ended_at, now),
            _result(row),
        )
    return table


def _tenants_table(rows: Sequence[TenantSummary]) -> Table:
    numbers = ("runs", "jobs", "in", "cached", "out", "GPU", "tokens/GPU-s", "wait", "batch", "failed", "cancelled")
    table = _table(("tenant",), numbers)
    for row in rows:
        table.add_row(
            _safe_text(row.tenant),
            _format_count(row.runs),
            _format_count(row.jobs),
            _format_count(row.prompt_tokens),
            _format_count(row.cached_tokens),
            _format_count(row.output_tokens),
            _format_seconds(row.gpu_seconds),
            _format_count(row.tokens_per_gpu_second),
            _format_ms(row.queue_ms_mean),
            _EMPTY if row.batch_size_mean is None else f"{row.batch_size_mean:.1f}",
            _format_count(row.failed + row.expired),
            _format_count(row.cancelled),
        )
    return table


def _jobs_table(rows: Sequence[LedgerEntry]) -> Table:
    numbers = ("try", "in", "cached", "out", "wait", "first", "total", "ended")
    table = _table(("tenant", "run", "step", "job", "lane"), numbers, "result")
    now = time.time()
    for row in rows:
        table.add_row(
            _safe_text(row.tenant),
            _safe_text(row.run_id),
            _safe_text(row.step_id),
            _safe_text(row.job_id),
            row.lane,
            str(row.attempt),
            _format_count(row.prompt_tokens),
            _format_count(row.cached_tokens),
            _format_count(row.output_tokens),
            _format_ms(row.queue_ms),
            _format_ms(row.first_token_ms),
            _format_ms(row.total_ms),
            _format_age(row.ended_at, now),
            _safe_text(
                (row.finish or "done") if row.outcome is Outcome.DONE else (row.error_code or row.outcome.value)
            ),
        )
    return table


def _safe_text(text: str) -> Text:
    # Clients choose these names: neither markup nor escape sequences in them may reach the terminal.
    return Text("".join(char if char.isprintable() else "·" for char in text))


def _result(row: RunSummary) -> str:
    parts = [f"{count} {name}" for name in ("failed", "cancelled", "expired") if (count := getattr(row, name))]
    return ", ".join(parts) or "done"


def _format_count(number: float | None) -> str:
    if number is None:
        return _EMPTY
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999 950 would round to 1000.0k.
        if number >= size * 0.99995 and number >= 1000:
            scaled = number / size
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}"


def _format_ms(ms: float | None) -> str:
    return _EMPTY if ms is None else _format_seconds(ms / 1000)


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return _EMPTY
    ms = seconds * 1000
    if ms < 0.05:
        return "0"
    if ms < 9.95:
        return f"{ms:.1f}ms"
    if ms < 999.5:
        return f"{ms:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    if (whole := round(seconds)) < 3600:
        return f"{whole // 60}m{whole % 60:02}"
    return f"{whole // 3600}h{whole % 3600 // 60:02}"


def _format_age(then: float, now: float) -> str:
    seconds = max(0.0, now - then)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"


if __name__ == "__main__":
    ledger_app()()
