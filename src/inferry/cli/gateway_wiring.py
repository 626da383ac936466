"""Makes the gateway around a pool of workers. Part of the composition root: which component hears which job event is
written down here.
"""

from collections.abc import Mapping

from inferry.admission.overflow_budget import OverflowBudget
from inferry.admission.queue_limiter import QueueLimiter
from inferry.admission.quota_gate import QuotaGate
from inferry.dispatch.admission_control import AdmissionControl
from inferry.dispatch.budget import Budget
from inferry.dispatch.budget_writer import BudgetWriter
from inferry.dispatch.cancel_sender import CancelSender
from inferry.dispatch.capacity import CapacityTracker
from inferry.dispatch.deadlines import Deadlines
from inferry.dispatch.fleet_monitor import FleetMonitor
from inferry.dispatch.foreign_load import ForeignLoadBound
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.gpu_accounting import GpuAccounting
from inferry.dispatch.hedging import HedgePolicy
from inferry.dispatch.job_host import JobHost
from inferry.dispatch.lifecycle import JobLifecycle
from inferry.dispatch.loop import DispatchLoop
from inferry.dispatch.model_catalog import ModelCatalog
from inferry.dispatch.overflow import OverflowRouter
from inferry.dispatch.pool import Pool
from inferry.dispatch.queue_admission import QueueAdmission
from inferry.dispatch.scale_monitor import ScaleMonitor
from inferry.dispatch.singleflight.single_flight import SingleFlight
from inferry.dispatch.task_set import TaskSet
from inferry.dispatch.usage_validator import UsageValidator
from inferry.dispatch.values import Sharing
from inferry.domain.clock import Clock
from inferry.domain.job_events import JobEvents
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ports import Tokenizer
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.queue_depth import QueueDepth
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.observe.tracing.tracer import Tracer
from inferry.observe.watched_states import by_lane, by_limit
from inferry.prediction.estimator import Estimator
from inferry.prediction.overflow_rule import OverflowRule
from inferry.prediction.scaling import ScalingPolicy
from inferry.prediction.wait_model import WaitModel
from inferry.runs.registry import RunRegistry
from inferry.scheduling.scheduler import Scheduler


def make_gateway(
    *,
    lanes: Mapping[Lane, LanePolicy],
    pool: Pool,
    recorder: Recorder,
    metrics: Metrics,
    clock: Clock,
    tokenizers: dict[str, Tokenizer] | None = None,
    gate: QuotaGate | None = None,
    runs: RunRegistry | None = None,
    watermarks: BudgetWriter | None = None,
    sharing: Sharing | None = None,
    max_queued_bytes: int | None = None,
    keeps_retry_slots: bool = True,
    request_timeout_s: float | None = None,
    tracer: Tracer | None = None,
    scaling: ScalingPolicy | None = None,
    overflow: OverflowBudget | None = None,
    scheduler: Scheduler | None = None,
) -> Gateway:
    """A gateway around a pool. Must be called on its event loop."""
    admission = _admission_control(gate or QuotaGate({}), runs, clock, watermarks)
    depth, estimator, deadlines = QueueDepth(), Estimator(), Deadlines(request_timeout_s, clock.now, pool.is_remote)
    limiter = QueueLimiter(lanes, depth, max_queued_bytes=max_queued_bytes, keeps_retry_slots=keeps_retry_slots)
    waits, gpu_accounting = WaitModel(depth), _gpu_accounting(pool, recorder, metrics, clock)
    router = _overflow_router(overflow, lanes, pool, admission.runs, metrics, clock)
    loop = make_loop(
        scheduler=(scheduler := scheduler or Scheduler(lanes)),
        lanes=lanes,
        pool=pool,
        recorder=recorder,
        metrics=metrics,
        clock=clock,
        depth=depth,
        queue_admission=QueueAdmission(scheduler, limiter, waits, router),
        estimator=estimator,
        deadlines=deadlines,
        gpu_accounting=gpu_accounting,
        budget=admission,
        tracer=tracer,
        router=router,
    )
    _watch_states(metrics, pool, recorder, scheduler, depth, limiter, waits, estimator, admission, loop, lanes, clock)
    return Gateway(
        clock=clock,
        models=ModelCatalog(lanes, pool, {} if tokenizers is None else tokenizers, estimator, clock),
        pool=pool,
        loop=loop,
        host=(host := JobHost(pool, loop, admission, recorder, metrics, watermarks, tracer)),
        single_flight=SingleFlight(sharing or Sharing(), host, clock, deadlines),
        admission=admission,
        queue_limiter=limiter,
        deadlines=deadlines,
        recorder=recorder,
        metrics=metrics,
        gpu_accounting=gpu_accounting,
        scale=_scale_monitor(lanes, pool, loop, depth, scaling or ScalingPolicy(), metrics),
        watermarks=watermarks,
    )


def _admission_control(
    gate: QuotaGate, runs: RunRegistry | None, clock: Clock, watermarks: BudgetWriter | None
) -> AdmissionControl:
    if runs is None:  # an empty registry is false, and may have tombstones and parents
        runs = RunRegistry()
    admission = AdmissionControl(gate, runs, clock)
    if watermarks is not None:
        admission.on_renewed = watermarks.wake
    return admission


def _scale_monitor(
    lanes: Mapping[Lane, LanePolicy],
    pool: Pool,
    loop: DispatchLoop,
    depth: QueueDepth,
    policy: ScalingPolicy,
    metrics: Metrics,
) -> ScaleMonitor:
    scale = ScaleMonitor(lanes, pool, loop.used_fraction, depth, policy)
    metrics.watch(
        {
            "inferry_desired_workers": scale.desired_by_group,
            "inferry_waiting_work_seconds": scale.waiting_by_group,
        }
    )
    return scale


def _gpu_accounting(pool: Pool, recorder: Recorder, metrics: Metrics, clock: Clock) -> GpuAccounting:
    gpu_accounting = GpuAccounting(clock, pool.reported_view, recorder.record)
    metrics.watch(
        {
            "inferry_gpu_seconds_total": gpu_accounting.seconds_by_kind,
            "inferry_worker_gpu_utilization_ratio": gpu_accounting.utilisation,
        }
    )
    return gpu_accounting


def _overflow_router(
    budget: OverflowBudget | None,
    lanes: Mapping[Lane, LanePolicy],
    pool: Pool,
    runs: RunRegistry,
    metrics: Metrics,
    clock: Clock,
) -> OverflowRouter | None:
    if budget is None:
        return None
    rule = OverflowRule(lanes)
    router = OverflowRouter(rule, budget, clock, pool, root_of=runs.root_of)
    metrics.watch(
        {
            "inferry_overflow_jobs_total": lambda: router.overflowed,
            "inferry_overflow_refusals_total": lambda: router.refused,
            "inferry_overflow_cost_total": lambda: router.cost,
        }
    )
    return router


def _watch_states(
    metrics: Metrics,
    pool: Pool,
    recorder: Recorder,
    scheduler: Scheduler,
    depth: QueueDepth,
    limiter: QueueLimiter,
    waits: WaitModel,
    estimator: Estimator,
    admission: AdmissionControl,
    loop: DispatchLoop,
    lanes: Mapping[Lane, LanePolicy],
    clock: Clock,
) -> None:
    """Where metrics read states at scrape time."""
    metrics.workers.views = pool.views
    metrics.workers.kv_predicted = scheduler.predicted_kv_tokens
    gate = admission.gate
    metrics.watch(
        {
            "inferry_queue_depth": lambda: metrics.by_lane_and_model(depth.by_lane_and_model()),
            "inferry_queue_limit": lambda: {lane: policy.queue_limit for lane, policy in lanes.items()},
            "inferry_slo_ttft_target_seconds": lambda: _targets_s("ttft_ms", lanes),
            "inferry_slo_itl_target_seconds": lambda: _targets_s("itl_ms", lanes),
            "inferry_open_streams": lambda: loop.open_streams,
            "inferry_merged_deltas_total": lambda: loop.merged_deltas,
            "inferry_prefills_total": lambda: loop.prefills,
            "inferry_ledger_entries_written_total": lambda: recorder.written,
            "inferry_ledger_entries_dropped_total": lambda: recorder.dropped,
            "inferry_wait_prediction_coverage_ratio": waits.coverages,
            "inferry_output_prediction_log_error": lambda: estimator.output_accuracy.mean_abs_log_error,
            "inferry_pending_retries": lambda: by_lane(limiter.pending_retries()),
            "inferry_fairness_index": lambda: {lane: scheduler.jain_index(lane) for lane in lanes},
            "inferry_tenant_fairness_index": lambda: metrics.tenants.fairness(clock.now()),
            "inferry_active_tenants": lambda: len(metrics.tenants.tokens(clock.now())),
            "inferry_resident_runs": lambda: scheduler.session_counts().resident,
            "inferry_paused_calls": lambda: scheduler.session_counts().paused,
            "inferry_session_pauses_total": lambda: scheduler.session_counts().pauses,
            "inferry_session_pause_seconds_total": lambda: scheduler.session_counts().pause_s,
            "inferry_queued_bytes": lambda: limiter.queued_bytes,
            "inferry_limit_refusals_total": lambda: by_limit(gate.refused),
            "inferry_shadow_refusals_total": lambda: by_limit(gate.shadow_refused),
            "inferry_budget_overrun_tokens_total": lambda: gate.overrun_tokens,
            "inferry_budget_overrun_cost_total": lambda: gate.overrun_nanos / NANOS_PER_UNIT,
        }
    )


def _targets_s(key: str, lanes: Mapping[Lane, LanePolicy]) -> dict[Lane, float]:
    """The lanes' SLO targets of one kind, in seconds."""
    targets_ms: dict[Lane, float | None] = {lane: getattr(policy, key) for lane, policy in lanes.items()}
    return {lane: target_ms / 1000 for lane, target_ms in targets_ms.items() if target_ms is not None}


def make_loop(
    *,
    scheduler: Scheduler,
    lanes: Mapping[Lane, LanePolicy],
    pool: Pool,
    recorder: Recorder,
    metrics: Metrics,
    clock: Clock,
    depth: QueueDepth,
    queue_admission: QueueAdmission,
    estimator: Estimator,
    deadlines: Deadlines,
    gpu_accounting: GpuAccounting,
    budget: Budget | None = None,
    tracer: Tracer | None = None,
    router: OverflowRouter | None = None,
) -> DispatchLoop:
    """The dispatch loop, and which component hears which job event."""
    learns, model_waits = ((), ()) if router is None else ((router.rule,), (router.waits,))
    capacity = CapacityTracker(lanes, depth, estimator.learn_cached)
    foreign_load = ForeignLoadBound(depth, lambda worker: scheduler.use(worker).sequences)
    hedging = HedgePolicy(pool.policy.max_hedged_retry_ratio)
    # In this order: the queue depth before its readers, the pool last, because it may take the worker out.
    load = (depth, queue_admission, *model_waits, capacity, gpu_accounting, hedging, deadlines)
    events = JobEvents(
        queued=(depth, queue_admission, *model_waits, capacity, deadlines, metrics),
        sent=(*load, metrics),
        first_token=(capacity, gpu_accounting, hedging, *learns, metrics),
        produced=(metrics,),
        ended=(*load, estimator, *learns, metrics, recorder, *(() if tracer is None else (tracer,)), pool),
    )
    tasks, usage_validator = TaskSet(), UsageValidator(metrics)
    cancel_sender = CancelSender(pool.worker, tasks.spawn)
    lifecycle = JobLifecycle(
        scheduler=scheduler,
        lanes=lanes,
        pool=pool,
        clock=clock,
        events=events,
        cancel_sender=cancel_sender,
        usage_validator=usage_validator,
        gpu_accounting=gpu_accounting,
        budget=budget,
        overflow=router,
    )
    return DispatchLoop(
        scheduler=scheduler,
        pool=pool,
        clock=clock,
        lifecycle=lifecycle,
        queue_admission=queue_admission,
        depth=depth,
        fleet=FleetMonitor(scheduler, pool, capacity, foreign_load, hedging, gpu_accounting, metrics, clock.now),
        usage_validator=usage_validator,
        cancel_sender=cancel_sender,
        tasks=tasks,
        ticks=metrics.ticks,
    )
