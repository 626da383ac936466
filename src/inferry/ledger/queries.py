"""Reads and aggregates the ledger. The database computes the sums."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    Select,
    and_,
    case,
    func,
    or_,
    select,
    union_all,
)

from inferry.domain.lanes import Lane
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.reports import TIME_LIMIT_S, Report, ReportQuery, RunBudget, run_budgets
from inferry.domain.runs import TimelinePosition, TimelineRows, TreeSummary
from inferry.domain.settings_versions import SettingsVersion
from inferry.domain.spending import Spending
from inferry.domain.tenants import Tenant, decode_limits
from inferry.domain.traffic import RecordedCall, Traffic
from inferry.domain.values import replace
from inferry.ledger.client_errors import as_client_errors
from inferry.ledger.composed_report import composed_report, score_pairs
from inferry.ledger.measures import MEASURES, Columns, is_last, job_counts, measures, rolled_up, total, usage
from inferry.ledger.report_compare import compare_report
from inferry.ledger.report_queries import (
    breaches_report,
    efficiency_report,
    month_report,
    runs_report,
    templates_report,
    tenants_report,
)
from inferry.ledger.report_time_limit import time_limited
from inferry.ledger.report_totals import has_rollups
from inferry.ledger.reports import RunSummary, TenantSummary
from inferry.ledger.run_trees import run_tree, tree_members, with_roots
from inferry.ledger.schema import attempts, tenants
from inferry.ledger.settings_queries import query_active_settings, query_calls
from inferry.ledger.spending_queries import query_overflow, query_spending
from inferry.ledger.timeline_queries import query_timeline
from inferry.ledger.traffic_queries import query_traffic

TRAFFIC_TIME_LIMIT_S = 5.0


class LedgerQueries:
    """Queries of a ledger, newest first. Owns the engine; use it from one thread, and close it or use `with`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with as_client_errors(), self._engine.connect() as connection:
            yield connection

    def query_spending(self, wall: float) -> list[Spending]:
        """What tenants, keys and unfinished runs have spent, for this UTC day and month."""
        return query_spending(self._engine, wall)

    def overflow_spending(self, wall: float) -> list[Spending]:
        """What overflow has cost each tenant in this UTC day, and each unfinished run."""
        return query_overflow(self._engine, wall)

    def jobs(
        self, *, limit: int = 20, tenant: str | None = None, run: str | None = None, since: float | None = None
    ) -> list[LedgerEntry]:
        """The latest attempts that ended at or after `since`."""
        query = (
            select(attempts)
            .where(*_matching(tenant, run, since))
            .order_by(attempts.c.ended_at.desc(), attempts.c.job_id, attempts.c.attempt.desc())
            .limit(limit)
        )
        with self._reading() as connection:
            return [_entry(dict(row)) for row in connection.execute(query).mappings()]

    def runs(
        self,
        *,
        limit: int = 20,
        tenant: str | None = None,
        run: str | None = None,
        since: float | None = None,
        parent: str | None = None,
        before: float | None = None,
    ) -> list[RunSummary]:
        """The latest runs with an attempt that ended at or after `since`, and none that ended at or after `before`.

        Each is summed over all its attempts. `parent` selects the sub-runs of one run.
        """
        with self._reading() as connection:
            return self._runs(
                connection, limit=limit, tenant=tenant, run=run, since=since, parent=parent, before=before
            )

    def _runs(
        self,
        connection: Connection,
        *,
        limit: int,
        tenant: str | None,
        since: float | None,
        before: float | None,
        run: str | None = None,
        parent: str | None = None,
    ) -> list[RunSummary]:
        conditions = [*_matching(tenant, run, since), *([] if parent is None else [attempts.c.parent_run == parent])]
        chosen = _newest(attempts, attempts.c.run_id, conditions, before, limit)
        members = select(chosen.c.tenant, chosen.c.root, chosen.c.root.label("run_id")).cte("members")
        return _summaries(connection, members)

    def _trees(
        self, connection: Connection, *, limit: int, tenant: str | None, since: float, before: float
    ) -> list[RunSummary]:
        """The latest trees of runs, each summed up as the run of its root."""
        conditions = _matching(tenant, None, since)
        chosen = _newest(*with_roots(conditions), conditions, before, limit)
        return _summaries(connection, tree_members(chosen))

    def has_run(self, tenant: str, run: str) -> bool:
        """Whether an attempt of the run has ended."""
        query = select(attempts.c.job_id).where(*_matching(tenant, run, None)).limit(1)
        with self._reading() as connection:
            return connection.execute(query).first() is not None

    def sub_runs(self, tenant: str, run: str, limit: int = 100) -> list[str]:
        """The runs that name this one as their parent, the latest first."""
        query = (
            select(attempts.c.run_id)
            .where(attempts.c.tenant == tenant, attempts.c.parent_run == run)
            .group_by(attempts.c.run_id)
            .order_by(func.max(attempts.c.ended_at).desc(), attempts.c.run_id)
            .limit(limit)
        )
        with self._reading() as connection:
            return list(connection.execute(query).scalars())

    def tree(self, tenant: str, run: str) -> TreeSummary:
        """Totals of the run and its descendants."""
        below = run_tree(tenant, run)
        query = select(
            func.count(attempts.c.run_id.distinct()).label("runs"),
            func.count(attempts.c.job_id.distinct()).label("jobs"),
            *(
                func.coalesce(func.sum(attempts.c[name]), 0).label(name)
                for name in ("prompt_tokens", "cached_tokens", "output_tokens")
            ),
            total(attempts.c.cost_nanos).label("cost_nanos"),
        ).where(attempts.c.tenant == tenant, attempts.c.run_id.in_(select(below.c.run_id)))
        with self._reading() as connection:
            return TreeSummary(**connection.execute(query).mappings().one())

    def timeline(self, tenant: str, run: str, *, limit: int, after: TimelinePosition | None = None) -> TimelineRows:
        """The attempts of the run and its descendants in the order of their arrival, after a position."""
        with self._reading() as connection:
            return query_timeline(connection, tenant, run, limit, after)

    def cancelled_runs(self, since: float) -> list[tuple[str, str]]:
        """(tenant, run) of the runs that had a job cancelled with their run at or after `since`."""
        query = (
            select(attempts.c.tenant, attempts.c.run_id)
            .where(attempts.c.ended_at >= since, attempts.c.error_code == "run_cancelled")
            .distinct()
        )
        with self._reading() as connection:
            return [(tenant, run_id) for tenant, run_id in connection.execute(query)]

    def tenants(self, *, tenant: str | None = None, since: float | None = None) -> list[TenantSummary]:
        """Totals per tenant of the attempts that ended at or after `since`, the most tokens first.

        A run and its sub-runs count as one. Of attempts whose rows were deleted, those of whole hours.
        """
        conditions = _matching(tenant, None, since)
        source, root = with_roots(conditions)
        columns = (attempts, is_last(attempts).label("is_last"), root.label("root"))
        counted = select(*columns).select_from(source).where(*conditions).cte("counted")
        runs = func.count(counted.c.root.distinct()).label("runs")
        recent = select(counted.c.tenant, runs, *measures(counted.c)).group_by(counted.c.tenant)
        row = union_all(recent, rolled_up(tenant, since)).subquery().c
        totals = {name: total(row[name]) for name in ("runs", *MEASURES)}
        query = (
            select(
                row.tenant,
                *(totals[name].label(name) for name in _TENANT_TOTALS),
                func.sum(row.gpu_seconds).label("gpu_seconds"),
                # NULL instead of a division by zero.
                (totals["measured_tokens"] * 1.0 / func.nullif(func.sum(row.gpu_seconds), 0)).label(
                    "tokens_per_gpu_second"
                ),
                total(row.cost_nanos).label("cost_nanos"),
                (func.sum(row.queue_ms) / func.nullif(totals["queued"], 0)).label("queue_ms_mean"),
                (totals["batch_sizes"] * 1.0 / func.nullif(totals["batched"], 0)).label("batch_size_mean"),
            )
            .group_by(row.tenant)
            .order_by((totals["prompt_tokens"] + totals["output_tokens"]).desc(), row.tenant)
        )
        with self._reading() as connection:
            return [TenantSummary(**row) for row in connection.execute(query).mappings()]

    def run_budgets(self) -> dict[str, RunBudget]:
        """Run budgets of the tenants in the database."""
        query = select(tenants.c.name, tenants.c.limits)
        with self._reading() as connection:
            return run_budgets(
                Tenant(name=name, limits=decode_limits(limits)) for name, limits in connection.execute(query)
            )

    def traffic(self, since: float, until: float) -> Traffic:
        """Where the time of recent calls went. Raises ReportTimeout."""
        with as_client_errors(), time_limited(self._engine, TRAFFIC_TIME_LIMIT_S) as connection:
            return query_traffic(connection, since, until)

    def active_settings(self) -> SettingsVersion | None:
        """The active version of the settings; None before a gateway has stored one."""
        with self._reading() as connection:
            return query_active_settings(connection)

    def calls(self, since: float, until: float) -> list[RecordedCall]:
        """The calls of a period, for a simulation. Raises ReportTimeout."""
        with as_client_errors(), time_limited(self._engine, TIME_LIMIT_S) as connection:
            return query_calls(connection, since, until)

    def report(self, name: str, query: ReportQuery, time_limit_s: float = TIME_LIMIT_S) -> Report:
        """One of `domain.reports.REPORTS`. Raises ReportTimeout, and KeyError for another name."""
        with as_client_errors(), time_limited(self._engine, time_limit_s) as connection:
            if name == "runs":
                report = runs_report(partial(self._trees, connection), query)
            else:
                report = _REPORTS[name](connection, query)
            if name in _WITHOUT_ROLLUPS and has_rollups(connection, query):
                return replace(report, notes=(*report.notes, _ROLLED_UP_NOTE))
            return report

    def score_pairs(self, name: str, since: float) -> list[tuple[float, bool]]:
        """Score and agreement of every compared call of a cascade."""
        with as_client_errors(), self._engine.connect() as connection:
            return score_pairs(connection, name, since)


_WITHOUT_ROLLUPS = ("runs", "breaches", "templates", "compare", "composed")
_ROLLED_UP_NOTE = "Older attempts of the period are only in roll-ups, and not in this report."
_REPORTS: dict[str, Callable[[Connection, ReportQuery], Report]] = {
    "breaches": breaches_report,
    "tenants": tenants_report,
    "templates": templates_report,
    "efficiency": efficiency_report,
    "compare": compare_report,
    "month": month_report,
    "composed": composed_report,
}

_TENANT_TOTALS = TenantSummary.__struct_fields__[1 : TenantSummary.__struct_fields__.index("gpu_seconds")]
"""The columns of a tenant's summary that are sums of integers."""


def _matching(tenant: str | None, run: str | None, since: float | None) -> Sequence[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if tenant is not None:
        conditions.append(attempts.c.tenant == tenant)
    if run is not None:
        conditions.append(attempts.c.run_id == run)
    if since is not None:
        conditions.append(attempts.c.ended_at >= since)
    return conditions


def _newest(
    source: FromClause,
    root: ColumnElement[str],
    conditions: Sequence[ColumnElement[bool]],
    before: float | None,
    limit: int,
) -> CTE:
    """`tenant` and `root` of the runs or trees that match, the latest end first."""
    last_end = func.max(attempts.c.ended_at)
    return (
        select(attempts.c.tenant, root.label("root"))
        .select_from(source)
        .where(*conditions)
        .group_by(attempts.c.tenant, root)
        .having(*([] if before is None else [last_end < before]))
        .order_by(last_end.desc(), attempts.c.tenant, root)
        .limit(limit)
        .cte("chosen")
    )


def _summaries(connection: Connection, members: CTE) -> list[RunSummary]:
    """One summary per root of `members`, the latest end first."""
    return [_run(dict(row)) for row in connection.execute(_run_totals(_ranked(members).c)).mappings()]


def _ranked(members: CTE) -> CTE:
    """The attempts of these runs, ranked by their time in the queue, with the active time that each adds."""
    # Attempts that were never sent have no queue time: a partition of their own keeps them out of the ranks.
    partition = (attempts.c.tenant, members.c.root, attempts.c.queue_ms.is_(None))
    return (
        select(
            attempts,
            members.c.root,
            is_last(attempts).label("is_last"),
            func.row_number().over(partition_by=partition, order_by=attempts.c.queue_ms).label("rank"),
            func.count(attempts.c.queue_ms).over(partition_by=partition).label("waits"),
            _uncovered_s(_ARRIVED_AT, partition[:2]).label("active_s"),
            _uncovered_s(_SENT_AT, partition).label("running_s"),
        )
        .join(members, and_(members.c.tenant == attempts.c.tenant, members.c.run_id == attempts.c.run_id))
        .cte("ranked")
    )


def _run_totals(row: Columns) -> Select[Any]:
    """One row per root from the columns of `_ranked`."""
    is_middle = and_(row.queue_ms.is_not(None), (row.rank * 2).between(row.waits, row.waits + 2))
    return (
        select(
            row.tenant,
            row.root.label("run_id"),
            func.max(case((row.run_id == row.root, row.parent_run))).label("parent_run"),
            *(func.max(case((row.lane == lane.name, 1), else_=0)).label(lane.name) for lane in Lane),
            func.count(row.step_id.distinct()).label("steps"),
            *job_counts(row),
            *usage(row),
            func.avg(case((is_middle, row.queue_ms))).label("queue_ms_p50"),
            func.avg(row.queue_ms).label("queue_ms_mean"),
            func.max(row.queue_ms).label("queue_ms_max"),
            (1000 * func.sum(row.active_s)).label("active_ms"),
            (1000 * func.sum(row.running_s)).label("running_ms"),
            total(row.cost_nanos).label("cost_nanos"),
            func.min(row.ended_at - row.total_ms / 1000).label("started_at"),
            func.max(row.ended_at).label("ended_at"),
        )
        .group_by(row.tenant, row.root)
        .order_by(func.max(row.ended_at).desc(), row.tenant, row.root)
    )


_ARRIVED_AT: ColumnElement[float] = attempts.c.ended_at - attempts.c.total_ms / 1000
_SENT_AT: ColumnElement[float] = _ARRIVED_AT + attempts.c.queue_ms / 1000


def _uncovered_s(start: ColumnElement[float], partition: Sequence[ColumnElement[Any]]) -> ColumnElement[float]:
    """Seconds that an attempt adds to the union of the intervals: those that no earlier attempt covers."""
    end = attempts.c.ended_at
    order = (start, end, attempts.c.job_id, attempts.c.attempt)
    reached = func.max(end).over(partition_by=partition, order_by=order, rows=(None, -1))
    return case(
        (start.is_(None), 0.0),
        (or_(reached.is_(None), reached <= start), end - start),
        (reached < end, end - reached),
        else_=0.0,
    )


def _entry(row: dict[str, Any]) -> LedgerEntry:
    return LedgerEntry(outcome=Outcome(row.pop("outcome")), **row)


def _run(row: dict[str, Any]) -> RunSummary:
    lanes = tuple(lane.name for lane in Lane if row.pop(lane.name))
    return RunSummary(lanes=lanes, **row)
