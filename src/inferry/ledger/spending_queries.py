"""Spending of budgets before the gateway was started, summed by the database.

Attempts count as tenants were charged (`measures.is_charged`). A job counts in the day in which it ended, also after
its row was deleted and only the roll-up of its hour is left.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Engine, and_, case, func, not_, select
from sqlalchemy.sql.elements import ColumnElement

from inferry.domain.decisions import from_text
from inferry.domain.spending import Period, Spending
from inferry.ledger.measures import is_charged
from inferry.ledger.schema import attempts, rollups

ACTIVE_S = 86_400.0
"""A run is over when no attempt of its tree has ended for this long."""
HISTORY_S = 7 * 86_400.0
"""How far back the spending of an unfinished run is summed."""

_row = attempts.c
_TOKENS = func.sum(_row.prompt_tokens + _row.output_tokens)
_NANOS = func.coalesce(func.sum(_row.cost_nanos), 0)


def query_spending(
    engine: Engine,
    wall: float,
    *,
    tenant: str | None = None,
    active_s: float = ACTIVE_S,
    history_s: float = HISTORY_S,
) -> list[Spending]:
    """Spending of all tenants, or of one, in this UTC day and month, and of unfinished runs."""
    today = datetime.fromtimestamp(wall, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    charged: list[ColumnElement[bool]] = [is_charged(_row)]
    if tenant is not None:
        charged.append(_row.tenant == tenant)
    with engine.connect() as connection:
        return [
            *_since(connection, charged, tenant, "day", today.timestamp(), wall),
            *_since(connection, charged, tenant, "month", today.replace(day=1).timestamp(), wall),
            *_runs(connection, charged, wall - history_s, wall - active_s),
        ]


def _since(
    connection: Connection,
    charged: list[ColumnElement[bool]],
    tenant: str | None,
    period: Period,
    begin: float,
    wall: float,
) -> Iterator[Spending]:
    """Spending by key, then by tenant. Jobs without a key count for the tenant only."""
    recent = (
        select(_row.tenant, func.coalesce(_row.key_id, "").label("key_id"), _TOKENS, _NANOS)
        .where(*charged, _row.ended_at >= begin)
        .group_by(_row.tenant, _row.key_id)
    )
    r = rollups.c
    rolled_up = select(r.tenant, r.key_id, func.sum(r.charged_tokens), func.sum(r.charged_nanos)).where(r.hour >= begin)
    if tenant is not None:
        rolled_up = rolled_up.where(r.tenant == tenant)
    keys: dict[tuple[str, str], tuple[int, int]] = {}
    tenants: dict[str, tuple[int, int]] = {}
    for query in (recent, rolled_up.group_by(r.tenant, r.key_id)):
        for name, key_id, some_tokens, some_nanos in connection.execute(query):
            tokens, nanos = int(some_tokens), int(some_nanos)  # some databases sum integers to decimals
            of_key, of_tenant = keys.get((name, key_id), (0, 0)), tenants.get(name, (0, 0))
            keys[name, key_id] = (of_key[0] + tokens, of_key[1] + nanos)
            tenants[name] = (of_tenant[0] + tokens, of_tenant[1] + nanos)
    for (name, key_id), (tokens, nanos) in sorted(keys.items()):
        if key_id:
            yield Spending(tenant=name, period=period, tokens=tokens, nanos=nanos, at=wall, key_id=key_id)
    for name, (tokens, nanos) in sorted(tenants.items()):
        yield Spending(tenant=name, period=period, tokens=tokens, nanos=nanos, at=wall)


def _runs(
    connection: Connection, charged: list[ColumnElement[bool]], since: float, active_since: float
) -> Iterator[Spending]:
    """Spending of unfinished runs, each with its descendants."""
    # A call without a run id is a run of its own, which is never looked up: it counts for its ancestors only.
    is_anonymous = _row.run_id == _row.job_id
    query = (
        select(
            _row.tenant,
            _row.run_id,
            func.max(_row.parent_run).label("parent_run"),
            _TOKENS.label("tokens"),
            _NANOS.label("nanos"),
            func.max(_row.ended_at).label("ended_at"),
            func.max(case((is_anonymous, 1), else_=0)).label("is_anonymous"),
        )
        .where(*charged, _row.ended_at >= since, not_(and_(is_anonymous, _row.parent_run.is_(None))))
        .group_by(_row.tenant, _row.run_id)
        .order_by(_row.tenant, _row.run_id)
    )
    found = {(row.tenant, row.run_id): row for row in connection.execute(query)}
    totals: dict[tuple[str, str], tuple[int, int, float]] = {}
    for row in found.values():
        for run_id in _lineage(found, row):
            tokens, nanos, ended_at = totals.get((row.tenant, run_id), (0, 0, 0.0))
            totals[row.tenant, run_id] = (
                tokens + int(row.tokens),
                nanos + int(row.nanos),
                max(ended_at, row.ended_at),
            )
    for (tenant, run_id), (tokens, nanos, ended_at) in totals.items():
        own = found.get((tenant, run_id))
        if ended_at >= active_since and (own is None or not own.is_anonymous):
            parent_run = None if own is None else own.parent_run
            yield Spending(
                tenant=tenant,
                period="run",
                tokens=tokens,
                nanos=nanos,
                at=ended_at,
                run_id=run_id,
                parent_run=parent_run,
            )


def query_overflow(engine: Engine, wall: float, *, history_s: float = HISTORY_S) -> list[Spending]:
    """What overflow cost each tenant in this UTC day, and each run with its sub-runs within `history_s`."""
    today = datetime.fromtimestamp(wall, UTC).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    query = select(_row.tenant, _row.run_id, _row.parent_run, _row.ended_at, _row.decision).where(
        _row.ended_at >= min(today, wall - history_s), _row.decision.contains('"overflow":')
    )
    with engine.connect() as connection:
        rows = list(connection.execute(query))
    found = {(row.tenant, row.run_id): row for row in rows}
    days: dict[str, int] = {}
    runs: dict[tuple[str, str], int] = {}
    for row in rows:
        decision = from_text(row.decision)
        nanos = 0 if decision is None or decision.overflow is None else decision.overflow.cost_nanos or 0
        if row.ended_at >= today:
            days[row.tenant] = days.get(row.tenant, 0) + nanos
        for run_id in _lineage(found, row):
            runs[row.tenant, run_id] = runs.get((row.tenant, run_id), 0) + nanos
    return [
        *(Spending(tenant=name, period="day", tokens=0, nanos=nanos, at=wall) for name, nanos in days.items()),
        *(
            Spending(tenant=name, period="run", tokens=0, nanos=nanos, at=wall, run_id=run_id)
            for (name, run_id), nanos in runs.items()
        ),
    ]


def _lineage(found: Mapping[tuple[str, str], Any], row: Any) -> list[str]:
    """The run and its known ancestors. Stops at a cycle."""
    lineage: list[str] = [row.run_id]
    above: str | None = row.parent_run
    while above is not None and above not in lineage:
        lineage.append(above)
        parent_row = found.get((row.tenant, above))
        above = None if parent_row is None else parent_row.parent_run
    return lineage
