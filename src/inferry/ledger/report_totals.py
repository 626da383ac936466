"""Totals of a period from attempts, and from the roll-ups of attempts whose rows were deleted."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, func, select

from inferry.domain.reports import ReportQuery
from inferry.ledger.measures import MEASURES, is_last, measures, total
from inferry.ledger.run_trees import with_roots
from inferry.ledger.schema import attempts, rollups

MONTH_S = 365.25 / 12 * 86_400
_row = attempts.c


class Totals(NamedTuple):
    """Sums. `nanos` and `gpu_seconds` are None if unknown for all; `computed` are the tokens with known GPU time."""

    runs: int
    calls: int
    tokens: int
    nanos: int | None
    gpu_seconds: float | None
    computed: int
    queue_ms: float
    queued: int
    attained: int
    missed: int


def period(query: ReportQuery) -> list[ColumnElement[bool]]:
    """The attempts that a report is about."""
    conditions = [_row.ended_at >= query.since, _row.ended_at < query.until]
    return conditions if query.tenant is None else [*conditions, _row.tenant == query.tenant]


def total_by(connection: Connection, query: ReportQuery, *names: str) -> dict[tuple[str, ...], Totals]:
    """Totals by these columns. A run with its sub-runs counts in each group that it has a call in."""
    source, root = with_roots(period(query))
    counted = (
        select(attempts, is_last(attempts).label("is_last"), root.label("root"))
        .select_from(source)
        .where(*period(query))
        .cte("counted")
    )
    by = [counted.c[name] for name in names]
    recent = select(*by, func.count(counted.c.root.distinct()).label("runs"), *measures(counted.c)).group_by(*by)
    found: dict[tuple[str, ...], Totals] = {}
    for statement in (recent, _rolled_up(query, names)):
        for row in connection.execute(statement).mappings():
            key = tuple(row[name] for name in names)
            found[key] = _added(found.get(key), _totals(row))
    return found


def observed_s(connection: Connection, query: ReportQuery) -> float | None:
    """Length of the part of the period that has data: it begins with the first call. None without one."""
    first = _first_time(connection, query)
    return None if first is None else max(1.0, query.until - max(query.since, first))


def _first_time(connection: Connection, query: ReportQuery) -> float | None:
    """When the first call of the period arrived; None without one."""
    arrived = select(func.min(_row.ended_at - _row.total_ms / 1000)).where(*period(query))
    hours = select(func.min(rollups.c.hour)).where(*_hours(query))
    found = [connection.execute(one).scalar_one() for one in (arrived, hours)]
    return min((float(one) for one in found if one is not None), default=None)


def dearest(totals: dict[tuple[str, ...], Totals]) -> list[tuple[tuple[str, ...], Totals]]:
    """The groups, those that cost most first, then those with most tokens."""
    return sorted(totals.items(), key=lambda one: (-(one[1].nanos or 0), -one[1].tokens, one[0]))


def has_rollups(connection: Connection, query: ReportQuery) -> bool:
    """Whether rows of the period were deleted."""
    return connection.execute(select(rollups.c.hour).where(*_hours(query)).limit(1)).first() is not None


def _hours(query: ReportQuery) -> list[ColumnElement[bool]]:
    conditions = [rollups.c.hour >= query.since, rollups.c.hour < query.until]
    return conditions if query.tenant is None else [*conditions, rollups.c.tenant == query.tenant]


def _rolled_up(query: ReportQuery, names: Iterable[str]) -> Any:
    by = [rollups.c[name] for name in names]
    floats = ("gpu_seconds", "queue_ms")
    sums = (
        func.sum(rollups.c[name]).label(name) if name in floats else total(rollups.c[name]).label(name)
        for name in ("runs", *MEASURES)
    )
    return select(*by, *sums).where(*_hours(query)).group_by(*by)


def _totals(row: Any) -> Totals:
    return Totals(
        runs=int(row["runs"]),
        calls=int(row["jobs"]),
        tokens=int(row["prompt_tokens"]) + int(row["output_tokens"]),
        nanos=row["cost_nanos"],
        gpu_seconds=row["gpu_seconds"],
        computed=int(row["measured_tokens"]),
        queue_ms=float(row["queue_ms"]),
        queued=int(row["queued"]),
        attained=int(row["attained"]),
        missed=int(row["missed"]),
    )


def _added(one: Totals | None, other: Totals) -> Totals:
    if one is None:
        return other
    sums: list[Any] = [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]
    return Totals(*sums)
