"""The state of the gateway as the dashboard shows it. Pure: facts in, values out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from inferry.dispatch.gateway import Run, RunStatus, Totals, WorkerReport
from inferry.domain.attempts import Attempt
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.workers import WorkerView
from inferry.ingress.dashboard.values import (
    GatewayTotals,
    LaneSeries,
    LaneState,
    RunState,
    Series,
    TenantCost,
    TenantCosts,
    WorkerSeries,
    WorkerState,
)
from inferry.observe.figures import Figures, LaneFigures, WorkerFigures

MAX_TENANTS = 12
MAX_COUNTED_CALLS = 64
"""Calls in flight of one run whose state is looked up; a run rarely has more."""

AttemptOf = Callable[[str], Attempt | None]
_UNKNOWN_WORKER = WorkerFigures(running=0, kv_used=0, batch_mean=None, gpu_utilization=None)


def lane_states(
    moment: Figures, minute: Figures, policies: Mapping[Lane, LanePolicy], queued: Mapping[Lane, int]
) -> list[LaneState]:
    """Every lane: its queue now, rates of the last seconds, quantiles of the last minute."""
    return [
        _lane_state(lane, moment.lanes[lane], minute.lanes[lane], policy, queued.get(lane, 0))
        for lane, policy in policies.items()
    ]


def _lane_state(lane: Lane, moment: LaneFigures, minute: LaneFigures, policy: LanePolicy, queued: int) -> LaneState:
    return LaneState(
        lane=lane.name,
        ttft_target_ms=policy.ttft_ms,
        itl_target_ms=policy.itl_ms,
        queue_limit=policy.queue_limit,
        queued=queued,
        calls_per_s=_rounded(moment.calls_per_s),
        queue_p50_ms=_ms(minute.queue_p50_ms),
        queue_p95_ms=_ms(minute.queue_p95_ms),
        ttft_p50_ms=_ms(minute.ttft_p50_ms),
        ttft_p95_ms=_ms(minute.ttft_p95_ms),
        itl_p95_ms=_ms(minute.itl_p95_ms),
        attainment=_ratio(minute.attainment),
        fairness=_ratio(minute.fairness),
    )


def worker_states(reports: Iterable[WorkerReport], views: Iterable[WorkerView], minute: Figures) -> list[WorkerState]:
    view_of = {view.worker: view for view in views}
    return [_worker_state(one, view_of.get(one.name), minute.workers.get(one.name, _UNKNOWN_WORKER)) for one in reports]


def _worker_state(report: WorkerReport, view: WorkerView | None, minute: WorkerFigures) -> WorkerState:
    return WorkerState(
        name=report.name,
        kind=report.kind,
        group=report.group,
        phase=report.phase,
        since=report.since,
        drained=report.drained,
        breaker=report.breaker,
        share=_ratio(report.share) or 0.0,
        models=list(report.models),
        running=report.load.running,
        waiting=report.load.waiting,
        max_sequences=report.capacity.sequences,
        kv_used_tokens=report.load.kv_tokens,
        kv_capacity_tokens=None if view is None else view.kv_capacity,
        batch_mean=_ms(minute.batch_mean),
        gpu_utilization=_ratio(minute.gpu_utilization),
    )


def totals(
    moment: Figures, minute: Figures, lanes: Iterable[LaneState], workers: Sequence[WorkerState], in_flight: int
) -> GatewayTotals:
    limits = [one.max_sequences for one in workers]
    known = [one.gpu_utilization for one in workers if one.gpu_utilization is not None]
    judged = [(one.attainment, one.calls_per_s) for one in minute.lanes.values() if one.attainment is not None]
    weight = sum(calls for _, calls in judged)
    return GatewayTotals(
        calls_per_s=_rounded(moment.calls_per_s),
        prompt_tokens_per_s=_rounded(moment.prompt_tokens_per_s),
        output_tokens_per_s=_rounded(moment.output_tokens_per_s),
        refusals_per_s=_rounded(moment.refusals_per_s),
        in_flight=in_flight,
        queued=sum(one.queued for one in lanes),
        running=sum(one.running for one in workers),
        max_sequences=None if not limits or None in limits else sum(one for one in limits if one is not None),
        gpu_utilization=_ratio(sum(known) / len(known)) if known else None,
        attainment=_ratio(sum(part * calls for part, calls in judged) / weight) if weight > 0 else None,
    )


def live_run(
    run: Run, status: RunStatus, epoch: float, attempt_of: AttemptOf, tree: tuple[Totals, int], *, is_partial: bool
) -> RunState:
    """A run in memory. `epoch` is the Unix time at 0 of the gateway's clock."""
    states = {"queued": 0, "sent": 0, "streaming": 0, "ended": 0}
    for _, job_id in zip(range(MAX_COUNTED_CALLS), run.in_flight, strict=False):
        attempt = attempt_of(job_id)
        states["queued" if attempt is None else attempt.state.value] += 1
    used, runs = tree
    return RunState(
        id=run.run_id,
        tenant=run.tenant,
        status=status,
        is_call=run.is_anonymous,
        is_partial=is_partial,
        sub_runs=runs - 1,
        started_at=epoch + run.first_call_at,
        last_active_at=epoch + run.last_activity_at,
        queued=states["queued"],
        prefill=states["sent"],
        decode=states["streaming"],
        tree_in_flight=run.tree_in_flight,
        calls=used.jobs,
        failed=used.failed + used.expired,
        prompt_tokens=used.prompt_tokens,
        output_tokens=used.output_tokens,
        cost=used.cost_nanos / NANOS_PER_UNIT if used.cost_nanos else None,
    )


def recorded_run(row: Any, *, is_cancelled: bool) -> RunState:
    """A run of the ledger, which is no longer in memory."""
    return RunState(
        id=row.run_id,
        tenant=row.tenant,
        status=RunStatus.CANCELLED if is_cancelled else RunStatus.IDLE,
        is_call=row.jobs == 1,
        is_partial=False,
        sub_runs=0,
        started_at=row.started_at,
        last_active_at=row.ended_at,
        queued=0,
        prefill=0,
        decode=0,
        tree_in_flight=0,
        calls=row.jobs,
        failed=row.failed + row.expired,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        cost=_money(row.cost_nanos),
    )


def tenant_costs(rows: Sequence[Any], since: float, at: float) -> TenantCosts:
    """The tenants with the highest cost, those without a known one by their tokens."""
    ordered = sorted(rows, key=lambda row: (-(row.cost_nanos or 0), -(row.prompt_tokens + row.output_tokens)))
    listed = [
        TenantCost(
            tenant=row.tenant,
            calls=row.jobs,
            failed=row.failed + row.expired,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            gpu_seconds=row.gpu_seconds,
            cost=_money(row.cost_nanos),
        )
        for row in ordered[:MAX_TENANTS]
    ]
    return TenantCosts(at=at, since=since, tenants=listed, others=max(0, len(rows) - MAX_TENANTS))


def series_of(points: Sequence[Figures], epoch: float) -> Series:
    """The points as one list per figure."""
    names = list(dict.fromkeys(name for point in points for name in point.workers))
    return Series(
        at=[round(epoch + point.at, 1) for point in points],
        calls_per_s=[_rounded(point.calls_per_s) for point in points],
        output_tokens_per_s=[_rounded(point.output_tokens_per_s) for point in points],
        in_flight=[point.in_flight for point in points],
        lanes=[
            LaneSeries(
                lane=lane.name,
                queued=[point.lanes[lane].queued for point in points],
                ttft_p95_ms=[_ms(point.lanes[lane].ttft_p95_ms) for point in points],
                attainment=[_ratio(point.lanes[lane].attainment) for point in points],
            )
            for lane in Lane
        ],
        workers=[_worker_series(name, [point.workers.get(name) for point in points]) for name in names],
    )


def _worker_series(name: str, points: Sequence[WorkerFigures | None]) -> WorkerSeries:
    return WorkerSeries(
        name=name,
        running=[None if one is None else one.running for one in points],
        kv_used_tokens=[None if one is None else one.kv_used for one in points],
        gpu_utilization=[None if one is None else _ratio(one.gpu_utilization) for one in points],
    )


def _money(nanos: int | None) -> float | None:
    return None if nanos is None else int(nanos) / NANOS_PER_UNIT  # some databases sum integers to decimals


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _rounded(value: float) -> float:
    return round(max(0.0, value), 2)


def _ratio(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
