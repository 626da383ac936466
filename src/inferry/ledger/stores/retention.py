"""Deletes old rows of the ledger in small steps and adds them to the roll-ups of their hours.

A row and its part of a roll-up change in one transaction, so that sums over both tables never change. The rows of a run
are deleted together: not before the last one is old enough, not before those of its parent run, and not while a sub-run
is in use. So a run's page is complete or gone. The exception are rows twice as old, which are deleted in any case: of a
run that is used for so long only the newer rows are kept.

Used by one thread at a time. Methods block.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Table,
    and_,
    case,
    delete,
    func,
    not_,
    select,
    tuple_,
)

from inferry.domain.ledger import RetentionPolicy
from inferry.ledger.measures import MEASURES, is_last, measures
from inferry.ledger.schema import attempts, composed_calls, gpu_rollups, gpu_time, rollups
from inferry.ledger.stores.database import LedgerDatabase

STEP_ROWS = 500
"""About the number of rows that one transaction deletes."""
PASS_INTERVAL_S = 3600.0
HOUR_S = 3600

_a = attempts.c


class RetentionStore:
    """Rows of attempts and GPU time, and their roll-ups, under a policy. One pass per hour."""

    def __init__(self, database: LedgerDatabase, policy: RetentionPolicy, *, step_rows: int = STEP_ROWS) -> None:
        self._database = database
        self._policy = policy
        self._step_rows = step_rows
        self._next_pass_at = -math.inf
        self._scanned_to: float | None = -math.inf

    def sweep(self, now: float, limit: int) -> int:
        """One step: returns `limit` where more may be left in this pass, else 0."""
        if now < self._next_pass_at:
            return 0
        if self._roll_up_attempts(now) or self._roll_up_gpu_time(now):
            return limit
        self._delete_composed(now)
        self._delete_rollups(now)
        self._next_pass_at = now + PASS_INTERVAL_S
        self._scanned_to = -math.inf
        return 0

    def _roll_up_attempts(self, now: float) -> bool:
        """Whether there may be more old rows behind those of this step."""
        keep_s = self._policy.attempts_s
        if keep_s is None or self._scanned_to is None:
            return False
        with self._database.writing() as connection:
            rows = _old_rows(connection, now - keep_s, now - 2 * keep_s, self._scanned_to, self._step_rows)
            kept = {_run(row) for row in rows if not row.is_over}
            jobs = {row.job_id for row in rows if _run(row) in kept and row.is_too_old}
            last_jobs, is_cut = set(), False
            for run in sorted({_run(row) for row in rows} - kept):
                if is_cut := len(jobs) >= self._step_rows:
                    break
                found, is_cut = _jobs_of(connection, run, self._step_rows)
                jobs.update(found)
                if is_cut:
                    break
                last_jobs.add(found[-1])
            if jobs:
                self._move_attempts(connection, sorted(jobs), last_jobs)
        if not is_cut:  # else the rest of these runs is next
            self._scanned_to = _next_start(self._scanned_to, rows, self._step_rows, len(jobs))
        return self._scanned_to is not None

    def _move_attempts(self, connection: Connection, jobs: Sequence[str], last_jobs: Collection[str]) -> None:
        """Move all attempts of the jobs. `last_jobs`: one job of each run of which no row is left."""
        is_chosen = _a.job_id.in_(jobs)
        counted = (
            select(
                attempts,
                is_last(attempts).label("is_last"),
                self._hour(_a.ended_at).label("hour"),
                func.coalesce(_a.key_id, "").label("key"),
            )
            .where(is_chosen)
            .cte("counted")
        )
        row = counted.c
        # A sub-run counts for its root, which is deleted before it.
        is_end = and_(row.is_last, row.job_id.in_(last_jobs), row.parent_run.is_(None))
        runs = func.sum(case((is_end, 1), else_=0)).label("runs")
        dimensions = (row.hour, row.tenant, row.model, row.lane, row.key)
        sums = select(*dimensions[:-1], row.key.label("key_id"), runs, *measures(row)).group_by(*dimensions)
        self._add(connection, rollups, connection.execute(sums).mappings().all(), ("runs", *MEASURES))
        connection.execute(delete(attempts).where(is_chosen))

    def _roll_up_gpu_time(self, now: float) -> bool:
        keep_s = self._policy.gpu_time_s
        if keep_s is None:
            return False
        c = gpu_time.c
        identity = (c.worker, c.started_at, c.kind)
        old = select(*identity).where(c.ended_at < now - keep_s).order_by(c.ended_at).limit(self._step_rows)
        with self._database.writing() as connection:
            keys = [tuple(row) for row in connection.execute(old)]
            if keys:
                is_chosen = tuple_(*identity).in_(keys)
                row = select(gpu_time, self._hour(c.started_at).label("hour")).where(is_chosen).cte("chosen").c
                sums = select(row.hour, row.worker, row.kind, func.sum(row.gpu_seconds).label("gpu_seconds"))
                found = connection.execute(sums.group_by(row.hour, row.worker, row.kind)).mappings().all()
                self._add(connection, gpu_rollups, found, ("gpu_seconds",))
                connection.execute(delete(gpu_time).where(is_chosen))
        return len(keys) == self._step_rows

    def _delete_composed(self, now: float) -> None:
        """Delete rows of composed calls with the age of attempts. They have no roll-up."""
        if self._policy.attempts_s is not None:
            with self._database.writing() as connection:
                old = composed_calls.c.ended_at < now - self._policy.attempts_s
                connection.execute(delete(composed_calls).where(old))

    def _delete_rollups(self, now: float) -> None:
        if self._policy.rollups_s is not None:
            with self._database.writing() as connection:
                for table in (rollups, gpu_rollups):
                    connection.execute(delete(table).where(table.c.hour < now - self._policy.rollups_s))

    def _hour(self, seconds: ColumnElement[float]) -> ColumnElement[int]:
        """The begin of the hour."""
        return self._database.connector.floor(seconds / HOUR_S) * HOUR_S

    def _add(self, connection: Connection, table: Table, rows: Sequence[Any], names: Sequence[str]) -> None:
        """Add the rows to those with the same key."""
        insert = self._database.connector.insert(table)
        sums = {name: _added(table.c[name], insert.excluded[name]) for name in names}
        upsert = insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=sums)
        connection.execute(upsert, [dict(row) for row in rows])


def _old_rows(connection: Connection, cutoff: float, limit_at: float, start: float, limit: int) -> Sequence[Any]:
    """The oldest rows from `start` on, and whether their run may be deleted, or their job in any case."""
    other = attempts.alias("other")

    def none_where(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
        return not_(select(other.c.job_id).where(*conditions).exists())

    same_tenant = other.c.tenant == _a.tenant
    is_over = and_(
        none_where(same_tenant, other.c.run_id == _a.run_id, other.c.ended_at >= cutoff),
        none_where(same_tenant, other.c.run_id == _a.parent_run, other.c.run_id != _a.run_id),
        none_where(same_tenant, other.c.parent_run == _a.run_id, other.c.ended_at >= cutoff),
    )
    is_too_old = and_(_a.ended_at < limit_at, none_where(other.c.job_id == _a.job_id, other.c.ended_at >= limit_at))
    query = select(
        _a.tenant, _a.run_id, _a.job_id, _a.ended_at, is_over.label("is_over"), is_too_old.label("is_too_old")
    ).where(_a.ended_at < cutoff)
    if start > -math.inf:
        query = query.where(_a.ended_at >= start)
    return connection.execute(query.order_by(_a.ended_at).limit(limit)).all()


def _jobs_of(connection: Connection, run: tuple[str, str], limit: int) -> tuple[list[str], bool]:
    """The jobs of up to `limit` rows of a run, the oldest first, and whether the run has other jobs."""
    is_run = (_a.tenant == run[0]) & (_a.run_id == run[1])
    rows = select(_a.job_id).where(is_run).order_by(_a.tenant, _a.run_id, _a.ended_at).limit(limit)
    found = list(dict.fromkeys(connection.execute(rows).scalars()))
    others = select(_a.job_id).where(is_run, _a.job_id.not_in(found)).limit(1)
    return found, connection.execute(others).first() is not None


def _next_start(start: float, rows: Sequence[Any], limit: int, deleted: int) -> float | None:
    """Where the next step begins; None at the end of the pass."""
    if len(rows) < limit:
        return None
    last: float = rows[-1].ended_at
    # Rows of one moment that fill a step and are all kept are passed over.
    return last if last > start or deleted else math.nextafter(last, math.inf)


def _run(row: Any) -> tuple[str, str]:
    return row.tenant, row.run_id


def _added(stored: Column[Any], added: ColumnElement[Any]) -> ColumnElement[Any]:
    """Their sum. NULL is a sum without a value."""
    if not stored.nullable:
        return stored + added
    return case((stored.is_(None), added), (added.is_(None), stored), else_=stored + added)
