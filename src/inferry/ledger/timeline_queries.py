"""The attempts of a run and its sub-runs in the order of their arrival, page by page."""

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.runs import TimelinePosition, TimelineRows
from inferry.ledger.run_trees import run_tree
from inferry.ledger.schema import attempts

_ARRIVED_AT: ColumnElement[float] = attempts.c.ended_at - attempts.c.total_ms / 1000


def query_timeline(
    connection: Connection, tenant: str, run: str, limit: int, after: TimelinePosition | None
) -> TimelineRows:
    in_tree = and_(attempts.c.tenant == tenant, attempts.c.run_id.in_(select(run_tree(tenant, run).c.run_id)))
    order = (_ARRIVED_AT, attempts.c.job_id, attempts.c.attempt)
    query = select(attempts, _ARRIVED_AT.label("arrived_at")).where(in_tree).order_by(*order).limit(limit)
    ended_before: dict[str, float] = {}
    if after is not None:
        query = query.where(_is_after(*after))
        ends = (
            select(attempts.c.run_id, func.max(attempts.c.ended_at).label("ended_at"))
            .where(in_tree, after[0] >= _ARRIVED_AT)
            .group_by(attempts.c.run_id)
        )
        ended_before = {row.run_id: row.ended_at for row in connection.execute(ends)}
    rows = [dict(row) for row in connection.execute(query).mappings()]
    positions = [(row.pop("arrived_at"), row["job_id"], row["attempt"]) for row in rows]
    entries = [LedgerEntry(outcome=Outcome(row.pop("outcome")), **row) for row in rows]
    return TimelineRows(entries, positions[-1] if positions else None, ended_before)


def _is_after(arrived_at: float, job_id: str, attempt: int) -> ColumnElement[bool]:
    same_job = and_(attempts.c.job_id == job_id, attempts.c.attempt > attempt)
    same_time = _ARRIVED_AT.between(arrived_at, arrived_at)
    return or_(arrived_at < _ARRIVED_AT, and_(same_time, or_(attempts.c.job_id > job_id, same_job)))
