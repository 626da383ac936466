"""The report of composed models: how often the small model answered, how often it agreed, and what was saved."""

from typing import Any

from sqlalchemy import Connection, case, func, select

from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.proportions import wilson
from inferry.domain.reports import Cell, Column, Report, ReportQuery
from inferry.ledger.report_totals import period
from inferry.ledger.schema import attempts, composed_calls

_COLUMNS = (
    Column("name", "text", "Composed model."),
    Column("kind", "text", "cascade or ensemble."),
    Column("calls", "count", "Calls that were answered."),
    Column("accepted", "count", "Calls whose first answer was used; of a cascade, that of the small model."),
    Column("accepted_share", "ratio", "Their share."),
    Column("accepted_low", "ratio", "Wilson interval of the share, 95 %: lower end."),
    Column("accepted_high", "ratio", "Upper end."),
    Column("compared", "count", "Accepted answers that were compared with the large model's."),
    Column("agreed", "count", "Compared answers that were the same."),
    Column("agreement", "ratio", "Their share."),
    Column("agreement_low", "ratio", "Wilson interval of the agreement, 95 %: lower end."),
    Column("agreement_high", "ratio", "Upper end."),
    Column("cost", "money", "Cost of all steps, compared calls included; empty without prices."),
    Column("cost_large_only", "money", "Estimated cost of the same calls with the large model alone."),
    Column("saved", "ratio", "Part of that cost that was saved."),
)


def composed_report(connection: Connection, query: ReportQuery) -> Report:
    """One row for each composed model with calls that ended in the period."""
    row = composed_calls.c
    conditions = [row.ended_at >= query.since, row.ended_at < query.until]
    if query.tenant is not None:
        conditions.append(row.tenant == query.tenant)
    found = connection.execute(
        select(
            row.name,
            row.kind,
            func.count().label("calls"),
            func.sum(case((row.accepted, 1), else_=0)).label("accepted"),
            func.sum(case((row.accepted & row.agreed.is_not(None), 1), else_=0)).label("compared"),
            func.sum(case((row.accepted & row.agreed, 1), else_=0)).label("agreed"),
        )
        .where(*conditions)
        .group_by(row.name, row.kind)
        .order_by(row.name)
        .limit(query.limit + 1)
    ).all()
    costs = _costs(connection, query)
    rows = [_row(one, costs) for one in found[: query.limit]]
    return Report(
        name="composed",
        since=query.since,
        until=query.until,
        columns=_COLUMNS,
        rows=tuple(rows),
        notes=(
            "cost_large_only: what the large model's calls cost, and for each other call the mean of its compared "
            "calls, or of all its calls where none was compared.",
        ),
        is_truncated=len(found) > query.limit,
    )


def score_pairs(connection: Connection, name: str, since: float) -> list[tuple[float, bool]]:
    """Score and agreement of every compared call of a cascade."""
    row = composed_calls.c
    found = select(row.score, row.agreed).where(
        row.name == name, row.ended_at >= since, row.score.is_not(None), row.agreed.is_not(None)
    )
    return [(score, bool(agreed)) for score, agreed in connection.execute(found)]


def _costs(connection: Connection, query: ReportQuery) -> dict[tuple[str, str], tuple[int, int]]:
    """Nanos and calls by name and stage, of steps with a price."""
    row = attempts.c
    sums = (
        select(row.composed, func.sum(row.cost_nanos), func.count(row.job_id.distinct()))
        .where(*period(query), row.composed.is_not(None), row.cost_nanos.is_not(None))
        .group_by(row.composed)
    )
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for composed, nanos, calls in connection.execute(sums):
        name, _, stage = composed.rpartition("/")
        found[name, stage] = int(nanos), int(calls)
    return found


def _row(one: Any, costs: dict[tuple[str, str], tuple[int, int]]) -> tuple[Cell, ...]:
    calls, accepted, compared, agreed = int(one.calls), int(one.accepted), int(one.compared), int(one.agreed)
    is_cascade = one.kind == "cascade"
    spent = [nanos for (name, _), (nanos, _) in costs.items() if name == one.name]
    large, shadow = costs.get((one.name, "large"), (0, 0)), costs.get((one.name, "shadow"), (0, 0))
    sample = shadow if shadow[1] else large
    alone = large[0] + accepted * sample[0] / sample[1] if is_cascade and sample[1] else None
    cost = sum(spent) if spent else None
    return (
        *(one.name, one.kind, calls, accepted, accepted / calls, *wilson(accepted, calls)),
        *(compared, agreed, agreed / compared if compared else None),
        *(wilson(agreed, compared) if compared else (None, None)),
        *(_money(cost), _money(alone), None if cost is None or not alone else 1 - cost / alone),
    )


def _money(nanos: float | None) -> float | None:
    return None if nanos is None else nanos / NANOS_PER_UNIT
