"""The reports of the ledger, computed by the database. Portable SQL: no function that SQLite or PostgreSQL lacks.

Calls are jobs; tokens, GPU-seconds and cost are sums over all attempts. A call that shared another's execution is a
call without tokens and cost.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select

from inferry.domain.errors import RunBudgetExhausted, TenantBudgetExhausted
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.reports import Cell, Column, Report, ReportQuery, RunBudget
from inferry.ledger.measures import computed_tokens
from inferry.ledger.report_totals import MONTH_S, dearest, observed_s, period, total_by
from inferry.ledger.reports import RunSummary
from inferry.ledger.run_trees import with_roots
from inferry.ledger.schema import attempts, gpu_rollups, gpu_time

WEEK_S = 7 * 86_400.0
SHORT_DATA_S = 86_400.0
"""A rate from less than this is marked as uncertain: traffic differs between night and day."""
WASTE = ("cancelled", "preempted", "recomputed")
"""Kinds of GPU time that produced nothing a client received."""

RunsOf = Callable[..., list[RunSummary]]
_row = attempts.c
_BUDGET_CODES = (RunBudgetExhausted.code, TenantBudgetExhausted.code)
_TOKENS = func.coalesce(func.sum(_row.prompt_tokens + _row.output_tokens), 0)
_NANOS = func.sum(_row.cost_nanos)
_CALLS = func.count(_row.job_id.distinct())
_COMPUTED = func.sum(computed_tokens(_row))
_GPU_SECONDS = func.sum(_row.gpu_seconds)


def runs_report(runs: RunsOf, query: ReportQuery) -> Report:
    """Runs with their sub-runs whose last attempt ended in the period. `runs` are the ledger's summaries of trees."""
    found = runs(limit=query.limit + 1, tenant=query.tenant, since=query.since, before=query.until)
    rows = []
    for one in found:
        budget = _budget(query, one.tenant)
        cost = _money(one.cost_nanos)
        tokens = one.prompt_tokens + one.output_tokens
        took_s = one.ended_at - one.started_at
        used = _used(cost, tokens, budget)
        rows.append(
            (
                *(one.tenant, one.run_id, one.ended_at, cost, budget.money, tokens, budget.tokens, used),
                *(one.jobs, took_s, one.active_ratio, max(0.0, took_s - one.active_ms / 1000)),
                *(one.queue_ms_p50, one.queue_ms_max),
            )
        )
    columns = (
        Column("tenant", "text", "Tenant."),
        Column("run", "text", "Run id; the other columns are sums with its sub-runs."),
        Column("ended_at", "time", "End of the last attempt."),
        Column("cost", "money", "Cost, empty without a price."),
        Column("money_budget", "money", "Budget of a run in money."),
        Column("tokens", "count", "Prompt and output tokens."),
        Column("token_budget", "count", "Budget of a run in tokens."),
        Column("budget_used", "ratio", "Part of the tighter budget that was used."),
        Column("calls", "count", "Calls."),
        Column("seconds", "seconds", "From the first arrival to the last end."),
        Column("model_active", "ratio", "Part of that time with a call in flight."),
        Column("tool_seconds", "seconds", "Time without a call in flight: tools and the agent itself."),
        Column("wait_p50_ms", "ms", "Median time in the queue."),
        Column("wait_max_ms", "ms", "Longest time in the queue."),
    )
    return _table("runs", query, columns, rows)


def breaches_report(connection: Connection, query: ReportQuery) -> Report:
    """Runs with their sub-runs, by the week of their last attempt in the period."""
    bounds = _weeks(query.since, query.until)
    source, root = with_roots(period(query))
    by_run = (
        select(
            _row.tenant,
            root.label("root"),
            func.max(_row.ended_at).label("ended_at"),
            _TOKENS.label("tokens"),
            _NANOS.label("nanos"),
            func.sum(case((_row.error_code.in_(_BUDGET_CODES), 1), else_=0)).label("stopped"),
        )
        .select_from(source)
        .where(*period(query))
        .group_by(_row.tenant, root)
        .subquery()
    )
    week = case(*((by_run.c.ended_at < end, number) for number, end in enumerate(bounds[1:])), else_=len(bounds) - 2)
    over = _is_over(by_run.c.nanos, by_run.c.tokens, by_run.c.tenant, query)
    stopped = by_run.c.stopped > 0
    totals = (
        select(
            week.label("week"),
            func.count().label("runs"),
            func.sum(case((over, 1), else_=0)).label("over"),
            func.sum(case((stopped, 1), else_=0)).label("stopped"),
            func.sum(case((or_(over, stopped), 1), else_=0)).label("breached"),
            func.sum(by_run.c.stopped).label("calls"),
            func.sum(by_run.c.nanos).label("nanos"),
        )
        .group_by(week)
        .order_by(week)
    )
    found = {one.week: one for one in connection.execute(totals)}
    rows = [
        (
            datetime.fromtimestamp(bounds[number], UTC).date().isoformat(),
            *(int(one.runs), int(one.over), int(one.stopped), int(one.breached), one.breached / one.runs),
            *(int(one.calls), _per(_money(one.nanos), one.runs)),
        )
        for number in sorted(found, reverse=True)
        if (one := found[number])
    ]
    columns = (
        Column("week", "text", "Monday of the week, UTC."),
        Column("runs", "count", "Runs that ended; sub-runs count for their root."),
        Column("over_budget", "count", "Runs that cost more than their budget."),
        Column("stopped", "count", "Runs with a call that a budget refused or stopped."),
        Column("breached", "count", "Runs that are either."),
        Column("breach_ratio", "ratio", "Part of all runs."),
        Column("calls_stopped", "count", "Calls that a budget refused or stopped."),
        Column("cost_per_run", "money", "Mean cost of a run."),
    )
    notes = () if query.budget is not None or query.budgets else ("No run budget is configured; pass a budget.",)
    return _table("breaches", query, columns, rows, notes)


def tenants_report(connection: Connection, query: ReportQuery) -> Report:
    rows: list[tuple[Cell, ...]] = [
        (
            *(tenant, of.runs, of.calls, of.tokens, _money(of.nanos), _per(_money(of.nanos), of.runs)),
            *(of.gpu_seconds, _per(of.computed, of.gpu_seconds), _per(of.queue_ms, of.queued)),
            _per(of.attained, of.attained + of.missed),
        )
        for (tenant,), of in dearest(total_by(connection, query, "tenant"))
    ]
    columns = (
        Column("tenant", "text", "Tenant."),
        *_VOLUME,
        Column("cost_per_run", "money", "Mean cost of a run."),
        Column("gpu_seconds", "seconds", "GPU time, where known."),
        Column("tokens_per_gpu_second", "number", "Computed tokens per GPU-second."),
        Column("wait_mean_ms", "ms", "Mean time in the queue."),
        Column("attainment", "ratio", "Part of the calls with a target that met it."),
    )
    return _table("tenants", query, columns, rows)


def templates_report(connection: Connection, query: ReportQuery) -> Report:
    cached, prompt = func.sum(_row.cached_tokens), func.sum(_row.prompt_tokens)
    source, root = with_roots(period(query))
    runs_and_more = (func.count(root.distinct()), _CALLS, _TOKENS, _NANOS, cached, prompt, func.avg(_row.total_ms))
    statement = (
        select(_row.tenant, _row.template_id, *runs_and_more)
        .select_from(source)
        .where(*period(query))
        .group_by(_row.tenant, _row.template_id)
        .order_by(func.coalesce(_NANOS, 0).desc(), _TOKENS.desc(), _row.tenant, _row.template_id)
        .limit(query.limit + 1)
    )
    rows = [
        (tenant, template, runs, calls, int(tokens), _money(nanos), _per(_money(nanos), calls), _per(hits, all_), mean)
        for tenant, template, runs, calls, tokens, nanos, hits, all_, mean in connection.execute(statement)
    ]
    columns = (
        Column("tenant", "text", "Tenant."),
        Column("template", "text", "Template id that the client sent; empty without one."),
        *_VOLUME,
        Column("cost_per_call", "money", "Mean cost of a call."),
        Column("cached", "ratio", "Part of the prompt tokens that were cached."),
        Column("total_mean_ms", "ms", "Mean time from arrival to end."),
    )
    return _table("templates", query, columns, rows)


def efficiency_report(connection: Connection, query: ReportQuery) -> Report:
    """GPU time by worker. With a tenant, only the tenant's own GPU time is known."""
    own = (
        select(_row.worker, _COMPUTED, _GPU_SECONDS, func.max(case((_row.gpu_estimated.is_(True), 1), else_=0)))
        .where(*period(query), _row.worker.is_not(None))
        .group_by(_row.worker)
    )
    tokens = {worker: (computed, seconds, marked) for worker, computed, seconds, marked in connection.execute(own)}
    kinds: dict[str, dict[str, float]] = {}
    if query.tenant is None:
        for table, at in ((gpu_time, gpu_time.c.ended_at), (gpu_rollups, gpu_rollups.c.hour)):
            spent = (
                select(table.c.worker, table.c.kind, func.sum(table.c.gpu_seconds))
                .where(at >= query.since, at < query.until)
                .group_by(table.c.worker, table.c.kind)
            )
            for worker, kind, seconds in connection.execute(spent):
                of_worker = kinds.setdefault(worker, {})
                of_worker[kind] = of_worker.get(kind, 0.0) + float(seconds)
    rows = []
    for worker in sorted({*tokens, *kinds}):
        computed, attributed, estimated = tokens.get(worker, (None, None, 0))
        of = kinds.get(worker, {})
        total = sum(of.values())
        work = of.get("work", attributed)
        waste = sum(of.get(kind, 0.0) for kind in WASTE)
        parts = (waste, of.get("idle", 0.0), of.get("unattributed", 0.0)) if total else (None, None, None)
        utilisation = (total - of.get("idle", 0.0)) / total if total else None
        rows.append(
            (
                *(worker, None if computed is None else int(computed), work, _per(computed, attributed), total or None),
                *(utilisation, *parts, _per(waste, total), "yes" if estimated else "no"),
            )
        )
    columns = (
        Column("worker", "text", "Worker."),
        Column("computed_tokens", "count", "Uncached prompt tokens and output tokens."),
        Column("work_gpu_seconds", "seconds", "GPU time attributed to calls."),
        Column("tokens_per_gpu_second", "number", "Computed tokens per GPU-second of the calls with known GPU time."),
        Column("total_gpu_seconds", "seconds", "Wall time times GPUs, where it was recorded."),
        Column("utilisation", "ratio", "Part of the wall time that was not idle."),
        Column("wasted_gpu_seconds", "seconds", "GPU time of cancelled, preempted and recomputed work."),
        Column("idle_gpu_seconds", "seconds", "GPU time without work."),
        Column("unattributed_gpu_seconds", "seconds", "GPU time with no known owner."),
        Column("waste_ratio", "ratio", "Wasted part of the wall time."),
        Column("estimated", "text", "Whether GPU time is an estimate."),
    )
    return _table("efficiency", query, columns, rows)


def month_report(connection: Connection, query: ReportQuery) -> Report:
    """The period's rate, times a month of 30.4 days. The period begins with its first attempt."""
    data_s = observed_s(connection, query)
    if data_s is None:
        return _table("month", query, _MONTH_COLUMNS, [], ("No attempt ended in the period.",))
    factor = MONTH_S / data_s
    totals = dearest(total_by(connection, query, "tenant", "model"))
    rows: list[tuple[Cell, ...]] = [
        (
            *(tenant, model, of.calls, of.tokens, _money(of.nanos), int(of.tokens * factor)),
            _times(_money(of.nanos), factor),
        )
        for (tenant, model), of in totals
    ]
    total = sum(of.nanos or 0 for _, of in totals) / NANOS_PER_UNIT * factor
    notes = [f"Based on {_span(data_s)} of data; {total:.2f} per month in all."]
    if data_s < SHORT_DATA_S:
        notes.append("Uncertain: less than one day of data.")
    return _table("month", query, _MONTH_COLUMNS, rows, tuple(notes))


_VOLUME = (
    Column("runs", "count", "Runs; sub-runs count for their root."),
    Column("calls", "count", "Calls."),
    Column("tokens", "count", "Prompt and output tokens."),
    Column("cost", "money", "Cost, empty without a price."),
)
_MONTH_COLUMNS = (
    Column("tenant", "text", "Tenant."),
    Column("model", "text", "Model."),
    Column("calls", "count", "Calls in the period."),
    Column("tokens", "count", "Prompt and output tokens in the period."),
    Column("cost", "money", "Cost in the period, empty without a price."),
    Column("tokens_per_month", "count", "Tokens per month at this rate."),
    Column("cost_per_month", "money", "Cost per month at this rate."),
)


def _weeks(since: float, until: float) -> list[float]:
    """Mondays from the week of `since` to the first after `until`."""
    day = datetime.fromtimestamp(since, UTC).date()
    monday = datetime.combine(day - timedelta(days=day.weekday()), datetime.min.time(), UTC).timestamp()
    bounds = [monday, monday + WEEK_S]
    while bounds[-1] < until:
        bounds.append(bounds[-1] + WEEK_S)
    return bounds


def _budget(query: ReportQuery, tenant: str) -> RunBudget:
    return query.budgets.get(tenant, RunBudget()) if query.budget is None else RunBudget(money=query.budget)


def _used(cost: float | None, tokens: int, budget: RunBudget) -> float | None:
    parts = [_per(tokens, budget.tokens), _per(cost, budget.money)]
    return max((part for part in parts if part is not None), default=None)


def _is_over(
    nanos: ColumnElement[Any], tokens: ColumnElement[Any], tenant: ColumnElement[Any], query: ReportQuery
) -> ColumnElement[bool]:
    """Whether a run has used more than its budget."""
    if query.budget is not None:
        return func.coalesce(nanos, 0) > int(query.budget * NANOS_PER_UNIT)
    limits: Mapping[str, RunBudget] = query.budgets
    over: list[ColumnElement[bool]] = []
    for name, budget in limits.items():
        if budget.money is not None:
            over.append(and_(tenant == name, nanos > int(budget.money * NANOS_PER_UNIT)))
        if budget.tokens is not None:
            over.append(and_(tenant == name, tokens > budget.tokens))
    return or_(*over) if over else tokens < 0


def _table(
    name: str,
    query: ReportQuery,
    columns: tuple[Column, ...],
    rows: Sequence[tuple[Cell, ...]],
    notes: tuple[str, ...] = (),
) -> Report:
    """The report with at most as many rows as asked for."""
    return Report(
        name=name,
        since=query.since,
        until=query.until,
        columns=columns,
        rows=tuple(rows[: query.limit]),
        notes=notes,
        is_truncated=len(rows) > query.limit,
    )


def _money(nanos: Any) -> float | None:
    return None if nanos is None else int(nanos) / NANOS_PER_UNIT


def _per(amount: Any, number: Any) -> float | None:
    return None if amount is None or not number else float(amount) / float(number)


def _times(amount: float | None, factor: float) -> float | None:
    return None if amount is None else amount * factor


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86_400 else f"{seconds / 86_400:.1f} days"
