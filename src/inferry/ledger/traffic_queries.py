"""Where the time of recent calls went, summed by the database. Portable SQL."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from sqlalchemy import CTE, ColumnElement, Connection, and_, case, func, select

from inferry.domain.ledger import Outcome
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.traffic import LaneTraffic, TenantTraffic, Traffic, WorkerTraffic
from inferry.ledger.schema import attempts

MAX_ATTEMPTS = 20_000
"""Attempts that are read, the latest first: bounds the time of a query."""
MAX_TOOL_S = 300.0
"""A longer pause between two calls of a run is no tool: the run rests."""
TOP_TENANTS = 10
MIN_TEMPLATE_CALLS = 5
"""Calls from which a template counts as repeated."""

_row = attempts.c
_ARRIVED_AT = _row.ended_at - _row.total_ms / 1000


def query_traffic(connection: Connection, since: float, until: float) -> Traffic:
    """Attempts of the period that ran by themselves."""
    recent = _recent(since, until)
    row = recent.c
    count, runs = connection.execute(select(func.count(), func.count(row.run_id.distinct()))).one()
    top = _top_tenants(connection, row)
    return Traffic(
        since=since,
        until=until,
        attempts=count,
        runs=runs,
        lanes=tuple(_lane(one, top) for one in connection.execute(_by_lane(row)).mappings()),
        workers=tuple(_worker(one) for one in connection.execute(_by_worker(row)).mappings()),
        tenants=tuple(_tenant(one) for one in connection.execute(_by_tenant(row)).mappings()),
    )


def _recent(since: float, until: float) -> CTE:
    """The latest attempts, each with the time since the calls of its run before it had ended."""
    latest = (
        select(attempts, _ARRIVED_AT.label("arrived_at"))
        .where(_row.ended_at >= since, _row.ended_at < until, _row.shared_with.is_(None))
        .order_by(_row.ended_at.desc())
        .limit(MAX_ATTEMPTS)
        .cte("latest")
    )
    one = latest.c
    reached = func.max(one.ended_at).over(
        partition_by=(one.tenant, one.run_id), order_by=(one.arrived_at, one.ended_at, one.job_id), rows=(None, -1)
    )
    template_calls = func.count().over(partition_by=(one.tenant, one.template_id))
    return select(latest, (one.arrived_at - reached).label("pause_s"), template_calls.label("template_calls")).cte(
        "recent"
    )


def _by_lane(row: Any) -> Any:
    started = row.first_token_ms.is_not(None)
    paused = and_(row.pause_s > 0, row.pause_s <= MAX_TOOL_S)
    repeated = and_(row.template_id.is_not(None), row.template_calls >= MIN_TEMPLATE_CALLS)
    return select(
        row.lane,
        func.count().label("attempts"),
        *(_number(row.outcome == outcome.value).label(outcome.value) for outcome in Outcome),
        func.avg(row.queue_ms).label("queue_ms"),
        func.avg(row.batching_ms).label("batching_ms"),
        func.avg(case((started, row.first_token_ms - row.queue_ms))).label("prefill_ms"),
        func.avg(case((started, row.total_ms - row.first_token_ms))).label("decode_ms"),
        (1000 * func.avg(case((paused, row.pause_s)))).label("tool_ms"),
        _number(paused).label("tool_calls"),
        _worker_s(row).label("worker_s"),
        func.avg(row.prompt_tokens * 1.0).label("prompt_tokens"),
        func.avg(row.prompt_tokens * 1.0 * row.prompt_tokens).label("prompt_tokens_squared"),
        func.avg(row.output_tokens * 1.0).label("output_tokens"),
        (func.sum(row.cached_tokens) * 1.0 / func.nullif(func.sum(row.prompt_tokens), 0)).label("cached_ratio"),
        func.avg(case((repeated, 1.0), else_=0.0)).label("templated_ratio"),
    ).group_by(row.lane)


def _by_worker(row: Any) -> Any:
    decoded = and_(row.first_token_ms.is_not(None), row.output_tokens > 1)
    return (
        select(
            row.worker,
            func.count().label("attempts"),
            _number(row.outcome == Outcome.FAILED.value).label("failed"),
            func.avg(row.first_token_ms - row.queue_ms).label("prefill_ms"),
            (
                func.sum(case((decoded, row.total_ms - row.first_token_ms)))
                / func.nullif(func.sum(case((decoded, (row.output_tokens - 1) * 1.0))), 0)
            ).label("itl_ms"),
            func.sum(row.prompt_tokens - row.cached_tokens).label("computed_prompt_tokens"),
            func.sum(row.output_tokens).label("output_tokens"),
        )
        .where(row.worker.is_not(None))
        .group_by(row.worker)
        .order_by(row.worker)
    )


def _by_tenant(row: Any) -> Any:
    tokens = func.sum(row.prompt_tokens + row.output_tokens)
    return (
        select(
            row.tenant,
            func.count().label("attempts"),
            tokens.label("tokens"),
            func.sum(row.cost_nanos).label("nanos"),
            func.avg(row.queue_ms).label("queue_ms"),
        )
        .group_by(row.tenant)
        .order_by(tokens.desc(), row.tenant)
        .limit(TOP_TENANTS)
    )


def _worker_s(row: Any) -> Any:
    return func.coalesce(func.sum(row.total_ms - row.queue_ms), 0.0) / 1000


def _top_tenants(connection: Connection, row: Any) -> dict[str, tuple[str, float]]:
    """By lane: the tenant with the most seconds on workers, and how many."""
    used = _worker_s(row)
    found = connection.execute(
        select(row.lane, row.tenant, used).group_by(row.lane, row.tenant).order_by(used, row.tenant)
    )
    return {lane: (tenant, float(seconds)) for lane, tenant, seconds in found}


def _number(condition: ColumnElement[bool]) -> ColumnElement[Any]:
    return func.sum(case((condition, 1), else_=0))


def _lane(row: Any, top: Mapping[str, tuple[str, float]]) -> LaneTraffic:
    prompt = float(row["prompt_tokens"])
    # The database has no standard deviation in common with the other one.
    sd = sqrt(max(0.0, float(row["prompt_tokens_squared"]) - prompt * prompt))
    batching_ms, queue_ms, worker_s = row["batching_ms"], row["queue_ms"], float(row["worker_s"])
    tenant, used_s = top[row["lane"]]
    return LaneTraffic(
        lane=row["lane"],
        attempts=row["attempts"],
        done=row[Outcome.DONE.value],
        cancelled=row[Outcome.CANCELLED.value],
        expired=row[Outcome.EXPIRED.value],
        failed=row[Outcome.FAILED.value] + row[Outcome.PREEMPTED.value],
        queue_ms=queue_ms if queue_ms is None or batching_ms is None else max(0.0, queue_ms - batching_ms),
        batching_ms=batching_ms,
        prefill_ms=row["prefill_ms"],
        decode_ms=row["decode_ms"],
        tool_ms=row["tool_ms"],
        tool_calls=row["tool_calls"],
        worker_s=worker_s,
        prompt_tokens=prompt,
        prompt_tokens_sd=sd,
        output_tokens=float(row["output_tokens"]),
        cached_ratio=None if row["cached_ratio"] is None else float(row["cached_ratio"]),
        templated_ratio=float(row["templated_ratio"]),
        top_tenant=tenant,
        top_tenant_share=used_s / worker_s if worker_s else 0.0,
    )


def _worker(row: Any) -> WorkerTraffic:
    return WorkerTraffic(
        worker=row["worker"],
        attempts=row["attempts"],
        failed=row["failed"],
        prefill_ms=row["prefill_ms"],
        itl_ms=row["itl_ms"],
        computed_prompt_tokens=int(row["computed_prompt_tokens"]),
        output_tokens=int(row["output_tokens"]),
    )


def _tenant(row: Any) -> TenantTraffic:
    return TenantTraffic(
        tenant=row["tenant"],
        attempts=row["attempts"],
        tokens=int(row["tokens"]),
        cost=None if row["nanos"] is None else int(row["nanos"]) / NANOS_PER_UNIT,
        queue_ms=row["queue_ms"],
    )
