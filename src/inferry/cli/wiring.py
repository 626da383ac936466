"""The composition root: configuration in, objects out.

Components are made here and in the other `*_wiring` modules. Only the modules named in `tests/test_import_rules.py`
import workers and stores.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from inferry.admission.overflow_budget import OverflowBudget
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.watermarks import WatermarkTracker
from inferry.cli.app_wiring import make_app
from inferry.cli.composed_wiring import ComposedModels, compose
from inferry.cli.config.schema import Config, ConfigError, HealthConfig
from inferry.cli.config.workers import (
    RayWorkerConfig,
    WorkerConfig,
)
from inferry.cli.diagnosis_wiring import Diagnostics
from inferry.cli.gateway_wiring import make_gateway
from inferry.cli.observation_wiring import Observation
from inferry.cli.overflow_wiring import restored_overflow
from inferry.cli.provider_wiring import providers_of
from inferry.cli.queue_wiring import SharedQueue
from inferry.cli.ray_wiring import RayFleet, ray_fleets, scaling_limits
from inferry.cli.settings_wiring import make_settings
from inferry.cli.sharing_wiring import GatewaySharing, SharedLimits, make_shared_limits, share, shared_queue
from inferry.cli.storage_wiring import Storage, make_storage
from inferry.cli.tracing_wiring import Tracing, make_tracing
from inferry.cli.work_wiring import mount_work
from inferry.cli.worker_wiring import make_worker, worker_kind
from inferry.cli.workers_file_wiring import load_watched_workers, watch_workers_file
from inferry.dispatch.budget_writer import BudgetWriter
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.settings_manager import SettingsManager
from inferry.dispatch.spending_sync import SpendingSync
from inferry.dispatch.tenants import TenantManager, TenantWatcher
from inferry.dispatch.values import HealthPolicy
from inferry.dispatch.watermark_writer import WatermarkWriter
from inferry.dispatch.workers_file import WorkersFileWatcher
from inferry.domain.clock import Clock, SystemClock
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerUnusable
from inferry.domain.ledger_urls import IN_MEMORY
from inferry.domain.ports import Tokenizer, Worker
from inferry.domain.spending import Spending
from inferry.ingress.admin_scale import AdminScale
from inferry.ingress.admin_settings import AdminSettings
from inferry.ingress.app import App
from inferry.ingress.dashboard.data import DashboardData
from inferry.ingress.histories.endpoint import HistoryEndpoint
from inferry.ingress.histories.router import HistoriesRouter
from inferry.ingress.histories.summaries import Summaries
from inferry.ingress.responses.router import ResponsesRouter
from inferry.ingress.stored_calls import StoredCalls
from inferry.ingress.stored_work.anthropic_batches import MessageBatchesRouter
from inferry.ingress.stored_work.async_jobs import AsyncJobsRouter
from inferry.ingress.stored_work.files import FilesRouter
from inferry.ingress.stored_work.openai_batches import OpenAIBatchesRouter
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.recorder import Recorder
from inferry.ledger.stores import opening
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.tenants import TenantStore
from inferry.ledger.stores.watermarks import WatermarkStore
from inferry.observe.metrics import Metrics
from inferry.runs.registry import RunRegistry
from inferry.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


class Service(NamedTuple):
    """What `serve` runs."""

    app: App
    gateway: Gateway
    pool: Pool
    tenants: TenantWatcher
    accounts: SpendingSync
    gate: QuotaGate
    storage: Storage
    observation: Observation
    diagnostics: Diagnostics
    tracing: Tracing | None = None
    sharing: GatewaySharing | None = None
    settings: SettingsManager | None = None
    watch: WorkersFileWatcher[WorkerConfig] | None = None
    ray_fleets: Sequence[RayFleet] = ()

    def start(self) -> None:
        """Start the workers, and the watchers of files and of the database."""
        self.gateway.start()
        self.tenants.start()
        if self.sharing is None:
            self.storage.start()  # otherwise by the gateway that owns the workers
        else:
            self.storage.start_queue()
        self.observation.start()
        if self.settings is not None:
            self.settings.start()
        if self.watch is not None:
            self.watch.start()
        for fleet in self.ray_fleets:
            fleet.start()
        if self.sharing is not None:
            self.sharing.start()

    async def close(self) -> None:
        if self.settings is not None:
            await self.settings.close()
        if self.watch is not None:
            await self.watch.close()
        for fleet in self.ray_fleets:
            await fleet.close()
        await self.observation.close()
        await self.app.close()
        await self.storage.close()
        await self.accounts.close()
        await self.gateway.close()
        if self.sharing is not None:
            await self.sharing.close()
        await self.tenants.close()
        if self.tracing is not None:
            await self.tracing.close()


@contextmanager
def exclusive_use(config: Config) -> Iterator[None]:
    """Lock the configuration's ledger against other gateways. Raises ConfigError where another one has it."""
    with ExitStack() as held:
        try:
            held.enter_context(opening.exclusive_use(config.ledger))
        except LedgerUnusable as error:
            raise ConfigError(str(error)) from None
        yield


def build(config: Config, clock: Clock | None = None) -> Service:
    """The whole service. Must be called on the event loop that will run it; nothing is started."""
    clock = clock or SystemClock()
    workers: list[Worker] = []
    tokenizers: dict[str, Tokenizer] = {}
    watched = load_watched_workers(config)
    kinds: dict[str, str] = {}
    for worker_config in (*config.workers, *watched.values()):
        if isinstance(worker_config, RayWorkerConfig):
            continue  # its workers are added below
        worker, found = make_worker(worker_config, clock, config.lane_policies(), config.health)
        workers.append(worker)
        tokenizers.update(found)
        kinds[worker_config.name] = worker_kind(worker_config)
    service = assemble(config, workers, tokenizers, clock, kinds)
    fleets = ray_fleets(config, service.gateway, service.pool, clock)
    for fleet in fleets:
        tokenizers.update(fleet.tokenizers)
    service = service._replace(ray_fleets=fleets)
    if config.workers_file is None:
        return service
    return service._replace(watch=watch_workers_file(config, service.pool, watched, tokenizers, clock))


def assemble(
    config: Config,
    workers: Sequence[Worker],
    tokenizers: dict[str, Tokenizer],
    clock: Clock,
    kinds: Mapping[str, str] | None = None,
    app_type: type[App] = App,
) -> Service:
    """The service around given workers."""
    (watermark_store, recorder), load_spending = _open_ledger(config), partial(_load_spending, config.ledger, clock)
    shared = make_shared_limits(config, recorder, clock, load_spending)
    tenants, run_reader = watch_tenants(config, clock), _open_run_reader(config.ledger)
    gate, runs, overflow, watermarks = _restored_admission(config, run_reader, watermark_store, shared, recorder, clock)
    pool = Pool(workers, clock, health=health_policy(config.health), kinds=kinds)
    metrics = _make_metrics(config, workers, pool, tenants)
    tracing, lanes = make_tracing(config.tracing, clock, metrics), config.lane_policies()
    tracer = None if tracing is None else tracing.tracer
    gateway = make_gateway(
        lanes=lanes,
        pool=pool,
        recorder=recorder,
        metrics=metrics,
        clock=clock,
        tokenizers=tokenizers,
        gate=gate,
        runs=runs,
        watermarks=watermarks,
        sharing=config.single_flight.sharing(),
        max_queued_bytes=config.server.max_queued_bytes,
        keeps_retry_slots=config.server.retry_slots,
        request_timeout_s=config.server.request_timeout_s,
        tracer=tracer,
        scaling=config.scaling.policy(scaling_limits(config)),
        overflow=overflow,
        scheduler=Scheduler(lanes, weights=tenants.weight_of, sessions=config.sessions.limits()),
    )
    app = make_app(app_type, config, gateway, metrics, tenants, run_reader, tracer, clock)
    composed = compose(config, app, gateway, lanes)
    accounts = SpendingSync(gate, clock, load_spending)
    storage = _stored_content(config, app, clock, tenants, gateway, recorder, shared_queue(config, shared, pool))
    observation = Observation(metrics, clock, gate, storage, config.alerts)
    _mount_observation(config, app, gateway, observation, lanes)
    settings = _mount_settings(config, lanes, composed, app, gateway, storage, clock)
    read, prices = partial(_open_run_reader, config.ledger), config.price_list()
    diagnostics = Diagnostics(observation, gateway, pool, gate, tenants, lanes, read, prices)
    sharing = None if shared is None else share(shared, gateway, metrics, clock.wall() - runs.tombstone_s)
    service = Service(
        app, gateway, pool, tenants, accounts, gate, storage, observation, diagnostics, tracing, sharing, settings
    )
    diagnostics.mount(app)
    _follow_tenants(config, service, watermarks)
    return service


def _mount_settings(
    config: Config,
    lanes: dict[Lane, LanePolicy],
    composed: ComposedModels,
    app: App,
    gateway: Gateway,
    storage: Storage,
    clock: Clock,
) -> SettingsManager:
    settings = make_settings(config, lanes, composed, gateway, storage.database, storage.executor, clock)
    app.mount_admin(lambda refuse, fail: AdminSettings(refuse, fail, settings))
    return settings


def _mount_observation(
    config: Config, app: App, gateway: Gateway, observation: Observation, lanes: Mapping[Lane, LanePolicy]
) -> None:
    """Serve the dashboard, alerts, and what is computed once a second: GPU time, and the workers that groups need."""
    _mount_dashboard(config, app, gateway, observation, lanes)
    app.use_alerts(observation.alerting.report)
    observation.followers += [gateway.account_gpu_time, gateway.scale.sample]
    app.mount_admin(lambda refuse, fail: AdminScale(refuse, fail, gateway.scale.report))


def _make_metrics(config: Config, workers: Sequence[Worker], pool: Pool, tenants: TenantWatcher) -> Metrics:
    """Metrics with labels for the workers, also for those that come when this gateway owns them."""
    models = {model for worker in workers for model in worker.view().models}
    names = [worker.name for worker in workers]
    if not workers:
        models = {model for worker in config.workers for model in worker.models}
        names = [worker.name for worker in config.workers]
    metrics = Metrics(models, names)
    metrics.workers.health = pool.health
    metrics.tenants.weight_of = tenants.weight_of
    metrics.watch({"inferry_ledger_up": lambda: float(tenants.is_ledger_up)})
    return metrics


def watch_tenants(config: Config, clock: Clock) -> TenantWatcher:
    manager = TenantManager(TenantStore(config.ledger), config.configured_tenants())
    return TenantWatcher(manager, config.auth.mode, wall=clock.wall)


def _open_ledger(config: Config) -> tuple[WatermarkStore | None, Recorder]:
    """Raises ConfigError where the ledger cannot be opened, or another gateway has it."""
    try:
        # First, because it locks a PostgreSQL database. A ledger in memory needs no watermarks: budgets end with it.
        # Gateways that share limits have grants instead.
        url, is_shared = config.ledger, config.cluster.redis is not None
        watermarks = None if url == IN_MEMORY or is_shared else WatermarkStore(url, exclusive=True)
        return watermarks, Recorder(AttemptStore(url))
    except LedgerUnusable as error:
        raise ConfigError(str(error)) from None


def _stored_content(
    config: Config,
    app: App,
    clock: Clock,
    tenants: TenantWatcher,
    gateway: Gateway,
    recorder: Recorder,
    queue: SharedQueue | None,
) -> Storage:
    """Stored content and stored work, served by the app."""
    storage = make_storage(
        config.ledger,
        config.storage,
        config.retention.policy(),
        config.callbacks,
        clock,
        StoredCalls(app.serve, app.inference_paths, tenants),
        recorder,
        providers_of(config, clock, tenants, gateway, recorder),
        max_line_bytes=config.server.max_body_bytes,
        shared_queue=queue,
    )
    mount_work(config, app, storage, tenants, recorder)
    app.mount(lambda refuse, fail: FilesRouter(refuse, fail, storage.files))
    app.mount(lambda refuse, fail: OpenAIBatchesRouter(refuse, fail, storage.batches))
    app.mount(lambda refuse, fail: ResponsesRouter(refuse, fail, storage.responses, storage.background))
    app.responses.use_storage(storage.responses, storage.background)
    app.runs.use_batches(storage.batches)
    app.mount(lambda refuse, fail: MessageBatchesRouter(refuse, fail, storage.batches))
    app.mount(lambda refuse, fail: AsyncJobsRouter(refuse, fail, storage.async_work.jobs))
    app.use_storage(storage.tenant_data, storage.async_work.secrets)
    settings = {model: history.settings() for model, history in config.histories.items()}
    summaries = Summaries(settings, storage.documents, app.serve, clock)
    if settings:
        app.use_histories(lambda inner: HistoryEndpoint(inner, gateway, summaries))
    app.mount(lambda refuse, fail: HistoriesRouter(refuse, fail, storage.documents, summaries))
    return storage


def _mount_dashboard(
    config: Config, app: App, gateway: Gateway, observation: Observation, lanes: Mapping[Lane, LanePolicy]
) -> None:
    """Serve the dashboard. Its charts have one point per sample of the metrics."""
    history = observation.history
    alerts = observation.alerting.report if config.alerts.active_rules() else None
    dashboard = DashboardData(gateway, history, lanes, lambda: _open_run_reader(config.ledger), alerts)
    observation.followers.append(dashboard.points.sample)
    app.use_dashboard(dashboard)


def _restored_admission(
    config: Config,
    run_reader: LedgerQueries | None,
    store: WatermarkStore | None,
    shared: SharedLimits | None,
    recorder: Recorder,
    clock: Clock,
) -> tuple[QuotaGate, RunRegistry, OverflowBudget | None, BudgetWriter | None]:
    """Quotas, runs and the ceilings of overflow as the ledger has them."""
    tracker = shared.tracker if shared is not None else None if store is None else WatermarkTracker()
    gate = QuotaGate(config.price_list(), watermarks=tracker)
    runs = RunRegistry()
    if run_reader is not None:
        spending = run_reader.query_spending(clock.wall())
        gate.restore(spending, clock.now())
        for one in spending:
            if one.run_id is not None and one.parent_run is not None:
                runs.learn_parent(one.tenant, one.run_id, one.parent_run, clock.now())
        runs.restore(run_reader.cancelled_runs(clock.wall() - runs.tombstone_s), clock.now())
    overflow = restored_overflow(config.overflow, run_reader, tracker, clock)
    if shared is not None:
        return gate, runs, overflow, shared.grants
    writer = None if store is None else WatermarkWriter(gate, store, recorder, clock, overflow)
    return gate, runs, overflow, writer


def _follow_tenants(config: Config, service: Service, watermarks: BudgetWriter | None) -> None:
    """What follows a change of tenants, a revoked key, and a ledger that was replaced."""

    def end_unauthorized() -> None:
        ended = service.gateway.end_unauthorized(service.tenants.revocation_error)
        if ended:
            log.warning("ended %d calls in flight: their keys are no longer valid", ended)

    def rewrite_all() -> None:
        if watermarks is not None:
            watermarks.rewrite_all()
        service.app.use_ledger(lambda: _open_run_reader(config.ledger))

    service.tenants.on_change = service.accounts.request_sync
    service.tenants.on_keys_ended = end_unauthorized
    service.tenants.on_replaced = rewrite_all


def health_policy(config: HealthConfig) -> HealthPolicy:
    common = set(config.__struct_fields__) & set(HealthPolicy.__struct_fields__)
    return HealthPolicy(**{name: getattr(config, name) for name in common})


def _load_spending(ledger: str, clock: Clock) -> list[Spending]:
    """The spending of all tenants, read with a connection of its own. Raises LedgerUnusable."""
    if ledger == IN_MEMORY:
        return []
    with opening.open_queries(ledger) as run_reader:
        return run_reader.query_spending(clock.wall())


def _open_run_reader(ledger: str) -> LedgerQueries | None:
    """The read side of the ledger; None for a ledger in memory."""
    try:
        return opening.open_queries(ledger)
    except LedgerUnusable:
        return None
