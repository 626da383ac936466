"""Sums over attempts: the columns of reports and of roll-ups."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Select,
    and_,
    case,
    cast,
    func,
    not_,
    or_,
    select,
    text,
)
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from inferry.domain.errors import DeadlineExceeded
from inferry.domain.ledger import Outcome
from inferry.ledger.schema import attempts, rollups

Columns = ReadOnlyColumnCollection[str, ColumnElement[Any]]

MEASURES = tuple(column.name for column in rollups.columns if not column.primary_key and column.name != "runs")
"""What can be added up. Sums without a value are 0, except `cost_nanos` and `gpu_seconds`."""


def total(column: ColumnElement[Any]) -> ColumnElement[int]:
    """The sum of a column of integers, as an integer: PostgreSQL sums them to decimals."""
    return cast(func.sum(column), BigInteger)


_JOB_OUTCOMES = {
    "done": (Outcome.DONE,),
    "failed": (Outcome.FAILED, Outcome.PREEMPTED),
    "cancelled": (Outcome.CANCELLED,),
    "expired": (Outcome.EXPIRED,),
}
"""A job's outcome by the outcomes of its last attempt. One preempted without a later attempt has failed."""


def computed_tokens(row: Columns) -> ColumnElement[int]:
    """Uncached prompt tokens and output tokens of an attempt with known GPU time."""
    return case((row.gpu_seconds.is_not(None), row.prompt_tokens - row.cached_tokens + row.output_tokens))


def is_charged(row: Columns) -> ColumnElement[bool]:
    """Whether the tenant pays for the attempt.

    Completed ones, and those cancelled or ended by their deadline after output: of this attempt, or of an earlier one
    that it resumed. Lost and preempted attempts cost nothing; the attempt that resumed them has all tokens.
    """
    has_output = or_(row.first_token_ms.is_not(None), row.attempt > 1)
    is_stopped = or_(row.outcome == Outcome.CANCELLED.value, row.error_code == DeadlineExceeded.code)
    is_billable = or_(row.outcome == Outcome.DONE.value, and_(is_stopped, has_output))
    return and_(is_billable, row.shared_with.is_(None))


def measures(row: Columns) -> list[ColumnElement[Any]]:
    """The sums in the order of MEASURES. `row` has the columns of `attempts` and `is_last`."""
    charged = is_charged(row)
    sums: dict[str, ColumnElement[Any]] = {
        **{one.name: one for one in (*job_counts(row), *usage(row))},
        "charged_tokens": _sum(case((charged, row.prompt_tokens + row.output_tokens))),
        "charged_nanos": _sum(case((charged, row.cost_nanos))),
        "cost_nanos": total(row.cost_nanos),
        "measured_tokens": _sum(computed_tokens(row)),
        "queue_ms": func.coalesce(func.sum(row.queue_ms), 0.0),
        "queued": func.count(row.queue_ms),
        "batch_sizes": _sum(row.batch_size),
        "batched": func.count(row.batch_size),
        "attained": _sum(case((row.attained.is_(True), 1))),
        "missed": _sum(case((row.attained.is_(False), 1))),
    }
    return [sums[name].label(name) for name in MEASURES]


def rolled_up(tenant: str | None, since: float | None) -> Select[Any]:
    """Tenant, `runs` and the measures of attempts whose rows were deleted, per tenant."""
    c = rollups.c
    query = select(c.tenant, total(c.runs).label("runs"), *(_total_of(name).label(name) for name in MEASURES))
    if tenant is not None:
        query = query.where(c.tenant == tenant)
    if since is not None:
        query = query.where(c.hour >= since)
    return query.group_by(c.tenant)


def _total_of(name: str) -> ColumnElement[Any]:
    column = rollups.c[name]
    return total(column) if isinstance(column.type, BigInteger) else func.sum(column)


def _sum(column: ColumnElement[Any]) -> ColumnElement[int]:
    return func.coalesce(total(column), 0)


def is_last(table: FromClause) -> ColumnElement[bool]:
    """Whether this is the last attempt of its job."""
    later = attempts.alias("later")
    # The literal `attempt > 1` is implied, and lets the database use the partial index of retried attempts.
    retried = and_(later.c.job_id == table.c.job_id, later.c.attempt > table.c.attempt, later.c.attempt > text("1"))
    return not_(select(later.c.job_id).where(retried).exists())


def job_counts(row: Columns) -> list[ColumnElement[Any]]:
    def jobs_where(condition: ColumnElement[bool]) -> ColumnElement[Any]:
        return func.sum(case((condition, 1), else_=0))

    return [
        jobs_where(row.is_last).label("jobs"),
        func.count().label("attempts"),
        *(
            jobs_where(and_(row.is_last, row.outcome.in_([one.value for one in outcomes]))).label(name)
            for name, outcomes in _JOB_OUTCOMES.items()
        ),
    ]


def usage(row: Columns) -> list[ColumnElement[Any]]:
    return [
        func.sum(row[name]).label(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens", "gpu_seconds")
    ]
