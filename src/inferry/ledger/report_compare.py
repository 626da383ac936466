"""`compare`: two periods side by side, by the rules of the other reports."""

from datetime import UTC, datetime
from typing import Any, NamedTuple

from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, and_, case, func, select

from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.reports import MAX_ROWS, Cell, Column, Kind, Report, ReportQuery, as_json
from inferry.ledger.measures import computed_tokens
from inferry.ledger.report_queries import breaches_report, efficiency_report
from inferry.ledger.report_totals import MONTH_S, observed_s, period
from inferry.ledger.schema import attempts

ALL_LANES = "all"
_QUANTILES = (0.5, 0.95, 0.999, 1.0)
_row = attempts.c


class _Figures(NamedTuple):
    """Totals of one lane in one period. The last two are of all lanes: a run and a worker have calls of several."""

    calls: int
    tokens: int
    cost: float | None
    wait_p50_ms: float | None
    wait_p95_ms: float | None
    wait_p999_ms: float | None
    wait_max_ms: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p999_ms: float | None
    ttft_max_ms: float | None
    attainment: float | None
    cost_per_month: float | None
    tokens_per_gpu_second: float | None
    utilisation: float | None
    breaches: int | None


_OF_ALL_LANES = ("utilisation", "breaches")
_UNITS: dict[str, Kind] = {
    "calls": "count",
    "tokens": "count",
    "cost": "money",
    "attainment": "ratio",
    "cost_per_month": "money",
    "tokens_per_gpu_second": "number",
    "utilisation": "ratio",
    "breaches": "count",
}
"""Units of the figures; milliseconds for all others."""


def compare_report(connection: Connection, query: ReportQuery) -> Report:
    """One row per lane and figure. The earlier period is as long as the later one and ends where it begins, unless the
    query says otherwise."""
    length_s = query.until - query.since
    until = query.since if query.before_until is None else query.before_until
    since = until - length_s if query.before_since is None else query.before_since
    before, after = (_by_lane(connection, one) for one in (replace(query, since=since, until=until), query))
    rows: list[tuple[Cell, ...]] = []
    for lane in sorted({*before, *after}, key=lambda name: (name != ALL_LANES, name)):
        for name in _Figures._fields if lane == ALL_LANES else _Figures._fields[: -len(_OF_ALL_LANES)]:
            was, now = (getattr(found[lane], name) if lane in found else None for found in (before, after))
            rows.append((lane, name, _UNITS.get(name, "ms"), was, now, _change_percent(was, now)))
    columns = (
        Column("lane", "text", "Lane, or all of them."),
        Column("figure", "text", "What is compared."),
        Column("unit", "text", "Its unit; a ratio is a fraction of 1."),
        Column("before", "number", "Value in the earlier period."),
        Column("after", "number", "Value in the later period."),
        Column("change_percent", "percent", "Change from the earlier to the later period."),
    )
    spans = tuple(end - begin for begin, end in ((since, until), (query.since, query.until)))
    notes: tuple[str, ...] = (
        f"Before: {_shown(since)} to {_shown(until)}; after: {_shown(query.since)} to {_shown(query.until)} (UTC).",
    )
    if spans[0] != spans[1]:
        notes += (f"The periods differ in length: {spans[0]:.0f} s and {spans[1]:.0f} s.",)
    return Report(
        name="compare",
        since=query.since,
        until=query.until,
        columns=columns,
        rows=tuple(rows[: query.limit]),
        notes=notes,
        is_truncated=len(rows) > query.limit,
    )


def _by_lane(connection: Connection, query: ReportQuery) -> dict[str, _Figures]:
    """Figures by lane, and of all lanes together; empty without attempts."""
    data_s = observed_s(connection, query)
    if data_s is None:
        return {}
    found = {}
    for is_total in (True, False):
        for lane, *figures in connection.execute(_figures(period(query), is_total=is_total)):
            calls, tokens, nanos, *times, computed, gpu_seconds = figures
            if calls:
                cost = None if nanos is None else int(nanos) / NANOS_PER_UNIT
                monthly = None if cost is None else cost * MONTH_S / data_s
                rate = float(computed) / gpu_seconds if gpu_seconds else None
                found[lane] = _Figures._make([calls, int(tokens), cost, *times, monthly, rate, None, None])
    if ALL_LANES in found:
        found[ALL_LANES] = found[ALL_LANES]._replace(
            utilisation=_utilisation(connection, query), breaches=_breaches(connection, query)
        )
    return found


def _utilisation(connection: Connection, query: ReportQuery) -> float | None:
    """Part of the recorded wall time of all workers that was not idle."""
    workers = as_json(efficiency_report(connection, replace(query, limit=MAX_ROWS)))["rows"]
    known = [(one["total_gpu_seconds"], one["idle_gpu_seconds"]) for one in workers if one["total_gpu_seconds"]]
    total_s = sum(total for total, _ in known)
    return (total_s - sum(idle for _, idle in known)) / total_s if total_s else None


def _breaches(connection: Connection, query: ReportQuery) -> int:
    """Runs over their budget, or with a call that a budget refused or stopped."""
    return sum(one["breached"] for one in as_json(breaches_report(connection, replace(query, limit=MAX_ROWS)))["rows"])


def _figures(inside: list[ColumnElement[bool]], *, is_total: bool) -> Any:
    """Quantiles are nearest ranks: the smallest value whose rank is at least q times the number of values."""
    lane: ColumnElement[Any] = case((_row.lane == _row.lane, ALL_LANES)) if is_total else _row.lane
    ranked = select(
        lane.label("lane"),
        attempts.c.job_id,
        (_row.prompt_tokens + _row.output_tokens).label("tokens"),
        computed_tokens(_row).label("computed"),
        *(_row[name] for name in ("cost_nanos", "gpu_seconds", "attained", "queue_ms", "first_token_ms")),
        *(
            column
            for name in ("queue_ms", "first_token_ms")
            for partition in [() if is_total else (_row.lane,)]
            for column in (
                func.row_number()
                .over(partition_by=(*partition, _row[name].is_(None)), order_by=_row[name])
                .label(f"{name}_rank"),
                func.count(_row[name]).over(partition_by=(*partition, _row[name].is_(None))).label(f"{name}_count"),
            )
        ),
    ).where(*inside)
    row = ranked.cte("ranked").c
    quantiles = (
        func.min(case((and_(row[name].is_not(None), row[f"{name}_rank"] >= q * row[f"{name}_count"]), row[name])))
        for name in ("queue_ms", "first_token_ms")
        for q in _QUANTILES
    )
    return select(
        row.lane,
        func.count(row.job_id.distinct()),
        func.coalesce(func.sum(row.tokens), 0),
        func.sum(row.cost_nanos),
        *quantiles,
        func.avg(case((row.attained.is_(True), 1.0), (row.attained.is_(False), 0.0))),
        func.sum(row.computed),
        func.sum(row.gpu_seconds),
    ).group_by(row.lane)


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _change_percent(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or not before else 100.0 * (after - before) / before
