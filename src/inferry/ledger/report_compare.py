"""`compare`: two periods side by side."""

from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, case, func, select

from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.reports import Cell, Column, Kind, Report, ReportQuery
from inferry.ledger.schema import attempts

ALL_LANES = "all"
_QUANTILES = (0.5, 0.95)
_row = attempts.c


class _Figures(NamedTuple):
    """Totals of one lane in one period."""

    calls: int
    tokens: int
    cost: float | None
    wait_p50_ms: float | None
    wait_p95_ms: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    attainment: float | None


_UNITS: dict[str, Kind] = {"calls": "count", "tokens": "count", "cost": "money", "attainment": "ratio"}
"""Units of the figures; milliseconds for all others."""


def compare_report(connection: Connection, query: ReportQuery) -> Report:
    """One row per lane and figure. The earlier period is as long as the later one and ends where it begins, unless the
    query says otherwise."""
    length_s = query.until - query.since
    until = query.since if query.before_until is None else query.before_until
    since = until - length_s if query.before_since is None else query.before_since
    before, after = (
        _by_lane(connection, begin, end, query.tenant) for begin, end in ((since, until), (query.since, query.until))
    )
    rows: list[tuple[Cell, ...]] = []
    for lane in sorted({*before, *after}, key=lambda name: (name != ALL_LANES, name)):
        for name in _Figures._fields:
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


def _by_lane(connection: Connection, since: float, until: float, tenant: str | None) -> dict[str, _Figures]:
    """Figures by lane, and of all lanes together; empty without attempts."""
    inside = [_row.ended_at >= since, _row.ended_at < until]
    if tenant is not None:
        inside.append(_row.tenant == tenant)
    found = {}
    for is_total in (True, False):
        for lane, *figures in connection.execute(_figures(inside, is_total=is_total)):
            calls, tokens, nanos, *rest = figures
            if calls:
                cost = None if nanos is None else int(nanos) / NANOS_PER_UNIT
                found[lane] = _Figures(calls, int(tokens), cost, *rest)
    return found


def _figures(inside: list[ColumnElement[bool]], *, is_total: bool) -> Any:
    """Quantiles are nearest ranks: the smallest value whose rank is at least q times the number of values."""
    lane: ColumnElement[Any] = case((_row.lane == _row.lane, ALL_LANES)) if is_total else _row.lane
    ranked = select(
        lane.label("lane"),
        attempts.c.job_id,
        (_row.prompt_tokens + _row.output_tokens).label("tokens"),
        *(_row[name] for name in ("cost_nanos", "attained", "queue_ms", "first_token_ms")),
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
    ).group_by(row.lane)


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _change_percent(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or not before else 100.0 * (after - before) / before
