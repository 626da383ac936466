"""The composition root: configuration in, objects out. The only module that imports workers and stores."""

import asyncio
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from inferry.admission.queue_limiter import QueueLimiter
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.watermarks import WatermarkTracker
from inferry.cli.config.loader import duplicate_names, load_workers, parse_workers
from inferry.cli.config.schema import Config, ConfigError, HealthConfig
from inferry.cli.config.single_flight import SingleFlightConfig
from inferry.cli.config.workers import (
    EmbeddedWorkerConfig,
    HttpWorkerConfig,
    OpenAIWorkerConfig,
    VllmInProcessWorkerConfig,
    VllmWorkerConfig,
    WorkerConfig,
)
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.spending_sync import SpendingSync
from inferry.dispatch.tenants import TenantManager, TenantWatcher
from inferry.dispatch.values import HealthPolicy, Sharing
from inferry.dispatch.watermark_writer import WatermarkWriter
from inferry.dispatch.workers_file import InvalidWorkersFile, WatchedFile, WorkerReconciler, WorkersFileWatcher
from inferry.domain.clock import Clock, SystemClock
from inferry.domain.errors import GatewayError
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger_urls import IN_MEMORY
from inferry.domain.ports import Tokenizer, Worker
from inferry.domain.spending import Spending
from inferry.domain.workers import Capacity
from inferry.ingress.app import App
from inferry.ingress.auth import Auth
from inferry.ingress.http.limits import HttpLimits
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.recorder import Recorder
from inferry.ledger.stores import file_lock
from inferry.ledger.stores.sqlite import LedgerUnusable, SqliteLedger, open_sqlite_queries
from inferry.ledger.stores.sqlite_tenants import SqliteTenantStore
from inferry.ledger.stores.sqlite_watermarks import SqliteWatermarkStore
from inferry.observe.metrics import Metrics
from inferry.workers.openai_http.advice import EngineFacts, advice
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker

log = logging.getLogger(__name__)

BUILT_IN_MODEL = "inferry-tiny"


class Service(NamedTuple):
    """What `serve` runs."""

    app: App
    gateway: Gateway
    pool: Pool
    tenants: TenantWatcher
    accounts: SpendingSync
    watch: WorkersFileWatcher[WorkerConfig] | None = None

    def start(self) -> None:
        """Begin to serve: workers, and whatever follows a file or a database."""
        self.gateway.start()
        self.tenants.start()
        if self.watch is not None:
            self.watch.start()

    async def close(self) -> None:
        if self.watch is not None:
            await self.watch.close()
        await self.app.close()
        await self.accounts.close()
        await self.gateway.close()
        await self.tenants.close()


@contextmanager
def exclusive_use(config: Config) -> Iterator[None]:
    """Keep every other gateway away from the configuration's ledger. Raises ConfigError where one is there already."""
    with ExitStack() as held:
        try:
            held.enter_context(file_lock.exclusive_use(config.ledger))
        except LedgerUnusable as error:
            raise ConfigError(str(error)) from None
        yield


def build(config: Config, clock: Clock | None = None) -> Service:
    """Everything, wired. Must be called on the event loop that will run it; nothing has started yet."""
    clock = clock or SystemClock()
    workers: list[Worker] = []
    tokenizers: dict[str, Tokenizer] = {}
    watched = _load_watched_workers(config)
    kinds: dict[str, str] = {}
    for worker_config in (*config.workers, *watched.values()):
        worker, found = _worker(worker_config, clock, config.lane_policies(), config.health)
        workers.append(worker)
        tokenizers.update(found)
        kinds[worker_config.name] = _kind(worker_config)
    service = assemble(config, workers, tokenizers, clock, kinds)
    if config.workers_file is None:
        return service
    return service._replace(watch=_watch(config, service, watched, tokenizers, clock))


def assemble(
    config: Config,
    workers: Sequence[Worker],
    tokenizers: dict[str, Tokenizer],
    clock: Clock,
    kinds: Mapping[str, str] | None = None,
) -> Service:
    """The service around given workers."""
    try:
        ledger = SqliteLedger(config.ledger)
    except LedgerUnusable as error:
        raise ConfigError(str(error)) from None
    health = config.health
    common = set(health.__struct_fields__) & set(HealthPolicy.__struct_fields__)
    policy = HealthPolicy(**{name: getattr(health, name) for name in common})
    tenants = TenantWatcher(
        TenantManager(SqliteTenantStore(config.ledger), config.configured_tenants()),
        config.auth.mode,
        wall=clock.wall,
    )
    run_reader = _open_run_reader(config.ledger)
    # What is in memory is gone with the process, and so are its budgets: there is nothing to keep.
    watermarks = None if config.ledger == IN_MEMORY else SqliteWatermarkStore(config.ledger)
    gate = QuotaGate(config.price_list(), watermarks=None if watermarks is None else WatermarkTracker())
    recorder = Recorder(ledger)
    if run_reader is not None:
        gate.restore(run_reader.query_spending(clock.wall()), clock.now())
    mark_keeper = None if watermarks is None else WatermarkWriter(gate, watermarks, recorder, clock)
    pool = Pool(workers, clock, health=policy, kinds=kinds)
    models = {model for worker in workers for model in worker.view().models}
    metrics = Metrics(models, [worker.name for worker in workers])
    metrics.watch(health=pool.health, ledger_up=lambda: float(tenants.ledger_error is None))
    gateway = Gateway(
        lanes=config.lane_policies(),
        pool=pool,
        recorder=recorder,
        metrics=metrics,
        clock=clock,
        tokenizers=tokenizers,
        gate=gate,
        watermarks=mark_keeper,
        weight_of=tenants.weight_of,
        single_flight=_single_flight_settings(config.single_flight),
        queue_limiter=QueueLimiter(
            config.lane_policies(),
            max_queued_bytes=config.server.max_queued_bytes,
            keeps_retry_slots=config.server.retry_slots,
        ),
    )
    if run_reader is not None:
        since = clock.wall() - gateway.admission_control.runs.tombstone_s
        gateway.admission_control.runs.restore(run_reader.cancelled_runs(since), clock.now())
    limits = HttpLimits(
        max_body_bytes=config.server.max_body_bytes,
        body_timeout_s=config.server.body_timeout_s,
        heartbeat_interval_s=config.server.heartbeat_interval_s,
        max_unread_bytes=config.server.max_unread_bytes,
    )
    auth = Auth(tenants, allow_remote=config.auth.allow_remote, wall=clock.wall)
    app = App(
        gateway,
        metrics,
        limits,
        auth,
        admin_key=config.server.admin_key,
        tenants=tenants,
        run_reader=run_reader,
        problem=lambda: tenants.ledger_error,
    )
    accounts = SpendingSync(gate, clock, lambda: _load_spending(config.ledger, clock.wall()))
    tenants.on_change = accounts.request_sync

    def end_unauthorized() -> None:
        ended = gateway.end_unauthorized(tenants.revocation_error)
        if ended:
            log.warning("ended %d calls in flight: their keys are no longer valid", ended)

    def rewrite_all() -> None:
        if mark_keeper is not None:
            mark_keeper.rewrite_all()
        app.use_ledger(lambda: _open_run_reader(config.ledger))

    tenants.on_keys_ended = end_unauthorized
    tenants.on_replaced = rewrite_all
    return Service(app, gateway, pool, tenants, accounts)


def _load_spending(ledger: str, wall: float) -> list[Spending]:
    """What everybody has spent, read with a connection of its own."""
    run_reader = _open_run_reader(ledger)
    if run_reader is None:
        return []
    with run_reader:
        return run_reader.query_spending(wall)


def _open_run_reader(ledger: str) -> LedgerQueries | None:
    """The read side of the ledger; None for one in memory, which has none."""
    try:
        return open_sqlite_queries(ledger)
    except LedgerUnusable:
        return None


def _single_flight_settings(config: SingleFlightConfig) -> Sharing:
    return Sharing(
        identical=config.identical,
        linger_s=config.linger_ms / 1000,
        replay_ttl_s=config.replay_ttl_s,
        replay_max_bytes=config.replay_max_bytes,
        join_history_max_bytes=config.join_history_max_bytes,
    )


def _load_watched_workers(config: Config) -> dict[str, WorkerConfig]:
    """What the configuration's `workers_file` holds now; nothing where there is none."""
    if config.workers_file is None:
        return {}
    return _workers_by_name(config, load_workers(Path(config.workers_file)))


def _workers_by_name(config: Config, workers: Sequence[WorkerConfig]) -> dict[str, WorkerConfig]:
    duplicates = duplicate_names(config, workers)
    if duplicates:
        raise ConfigError(
            f"{config.workers_file}: the configuration has workers of its own named {', '.join(duplicates)}"
        )
    return {worker.name: worker for worker in workers}


def _watch(
    config: Config,
    service: Service,
    watched: dict[str, WorkerConfig],
    tokenizers: dict[str, Tokenizer],
    clock: Clock,
) -> WorkersFileWatcher[WorkerConfig]:
    """What keeps the pool as the `workers_file` says."""
    assert config.workers_file is not None

    async def make(entry: WorkerConfig) -> tuple[Worker, str]:
        try:
            if isinstance(
                entry, EmbeddedWorkerConfig | VllmInProcessWorkerConfig
            ):  # reads a tokenizer, and may have to make a model
                worker, found = await asyncio.to_thread(_worker, entry, clock)
            else:
                worker, found = _worker(entry, clock, config.lane_policies(), config.health)
        except ConfigError as error:
            raise InvalidWorkersFile(str(error)) from None
        tokenizers.update(found)
        return worker, _kind(entry)

    def read(content: bytes) -> dict[str, WorkerConfig]:
        try:
            return _workers_by_name(config, parse_workers(content))
        except ConfigError as error:
            raise InvalidWorkersFile(str(error)) from None

    fleet = WorkerReconciler(service.pool, make, watched, grace_s=config.server.drain_timeout_s)
    return WorkersFileWatcher(WatchedFile(Path(config.workers_file)), read, fleet)


def _kind(config: WorkerConfig | HttpWorkerConfig) -> str:
    return str(config.__struct_config__.tag)


def http_worker(
    config: HttpWorkerConfig, clock: Clock, lanes: Mapping[Lane, LanePolicy], health: HealthConfig | None = None
) -> OpenAIHttpWorker:
    """The worker for a server that speaks the OpenAI API."""
    vllm = config if isinstance(config, VllmWorkerConfig) else None
    keys = config.api_keys if isinstance(config, OpenAIWorkerConfig) else ()
    health = health or HealthConfig()
    settings = HttpWorkerSettings(
        url=config.url.rstrip("/").removesuffix("/v1"),
        profile=PROFILES[_kind(config)],
        models=config.models,
        group=config.group,
        pool=config.pool,
        api_key=_secret(config, config.api_key),
        api_keys=tuple(key for name in keys if (key := _secret(config, name))),
        capacity=Capacity(config.max_sequences, config.kv_tokens, config.prefill_tokens),
        wants_priorities=vllm is not None and vllm.engine_priority,
        cache_salts=vllm is not None and vllm.isolation == "salt",
        salt_secret=None if vllm is None else _secret(config, vllm.salt_secret),
        controlled=config.capacity == "adaptive",
        chunk_tokens=config.chunk_tokens,
        connect_timeout_s=config.connect_timeout_s,
        first_token_timeout_s=config.first_token_timeout_s,
        inter_token_timeout_s=config.inter_token_timeout_s,
        liveness_interval_s=health.liveness_interval_s,
        liveness_timeout_s=health.liveness_timeout_s,
    )
    return OpenAIHttpWorker(config.name, settings, clock, lanes)


def advise(config: Config) -> list[str]:
    """What the configuration alone says about engines that stand in the way of a promise."""
    lanes = config.lane_policies()
    return [
        message
        for worker in config.workers
        if isinstance(worker, HttpWorkerConfig)
        for message in advice(_configured_facts(worker), lanes)
    ]


async def query_engines(config: Config, clock: Clock | None = None) -> list[str]:
    """The same after asking the servers themselves, and what keeps one from being asked."""
    lanes = config.lane_policies()
    messages: list[str] = []
    for worker_config in config.workers:
        if isinstance(worker_config, HttpWorkerConfig):
            worker = http_worker(worker_config, clock or SystemClock(), lanes)
            try:
                await worker.start()
                messages += advice(worker.engine_facts(), lanes)
            except GatewayError as error:
                messages += [
                    f"worker {worker_config.name}: {error.message}",
                    *advice(_configured_facts(worker_config), lanes),
                ]
            finally:
                await worker.close()
    return messages


def _configured_facts(worker: HttpWorkerConfig) -> EngineFacts:
    return EngineFacts(
        worker=worker.name,
        kind=_kind(worker),
        max_sequences=worker.max_sequences,
        prefill_tokens=worker.prefill_tokens,
        kv_tokens=worker.kv_tokens,
        chunk_tokens=worker.chunk_tokens,
    )


def _secret(config: HttpWorkerConfig, secret: str | None) -> str | None:
    """A secret as it is, or from the environment where it is written as `$NAME`."""
    if secret is None or not secret.startswith("$"):
        return secret
    found = os.environ.get(secret[1:])
    if not found:
        raise ConfigError(f"worker `{config.name}`: the environment variable {secret[1:]} is not set")
    return found


def _worker(
    config: WorkerConfig,
    clock: Clock,
    lanes: Mapping[Lane, LanePolicy] = DEFAULT_LANES,
    health: HealthConfig | None = None,
) -> tuple[Worker, dict[str, Tokenizer]]:
    match config:
        case EmbeddedWorkerConfig():
            return _embedded(config, clock)
        case VllmInProcessWorkerConfig():
            return _vllm_in_process(config, clock)
        case HttpWorkerConfig():
            return http_worker(config, clock, lanes, health), {}


def _embedded(config: EmbeddedWorkerConfig, clock: Clock) -> tuple[Worker, dict[str, Tokenizer]]:
    try:
        if importlib.util.find_spec("torch") is None:  # the engine's process needs it; this one does not
            raise ModuleNotFoundError("no torch", name="torch")
        from inferry.engine.config import EngineConfig
        from inferry.engine.tiny import ensure_tiny_model
        from inferry.engine.tokenizer import HfTokenizer
        from inferry.streams.detokenizer import Assembler
        from inferry.workers.in_process.embedded import EmbeddedWorker
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"worker `{config.name}` is of kind embedded, which needs {error.name}: install the `engine` extra "
            "(pip install 'inferry[engine]', in a clone pip install '.[engine]')"
        ) from None
    if config.model is None:
        directory = ensure_tiny_model(model_home() / BUILT_IN_MODEL)
        names = config.models or (BUILT_IN_MODEL,)
    else:
        directory = Path(config.model).expanduser()
        names = config.models or (directory.resolve().name,)
        if not (directory / "config.json").is_file():
            raise ConfigError(f"worker `{config.name}`: {directory} is not a model directory (no config.json)")
    try:
        tokenizer = HfTokenizer(directory)
        engine = EngineConfig(
            max_sequences=config.max_sequences,
            kv_tokens=config.kv_tokens,
            chunk_tokens=config.chunk_tokens,
            threads=config.threads,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"worker `{config.name}`: {error}") from None
    worker = EmbeddedWorker(
        config.name,
        model_dir=directory,
        models=names,
        group=config.group,
        pool=config.pool,
        engine=engine,
        default_output_tokens=config.default_output_tokens,
        controlled=config.capacity == "adaptive",
        make_assembler=lambda stops: Assembler(tokenizer, stops),
        clock=clock,
    )
    return worker, dict.fromkeys(names, tokenizer)


def _vllm_in_process(config: VllmInProcessWorkerConfig, clock: Clock) -> tuple[Worker, dict[str, Tokenizer]]:
    try:
        from inferry.engine.tokenizer import HfTokenizer
        from inferry.streams.detokenizer import Assembler
        from inferry.workers.in_process.vllm_inprocess import VllmEngine, VllmInProcessWorker
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"worker `{config.name}` is of kind vllm-inprocess, whose prompts are made here, which needs {error.name}: "
            "install the `engine` extra (pip install 'inferry[engine]', in a clone pip install '.[engine]')"
        ) from None
    directory = Path(config.model).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(f"worker `{config.name}`: {directory} is not a model directory (no config.json)")
    # Made absolute and not resolved: a virtual environment's interpreter is a link out of it.
    python = Path(config.python).expanduser().absolute()
    if not python.is_file():
        raise ConfigError(
            f"worker `{config.name}`: there is no interpreter {python}; vLLM has a virtual environment of its own "
            "(`make venv-vllm` makes one for CPUs), and `python` says where it is"
        )
    try:
        tokenizer = HfTokenizer(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"worker `{config.name}`: {error}") from None
    names = config.models or (directory.resolve().name,)
    worker = VllmInProcessWorker(
        config.name,
        model_dir=directory.absolute(),
        models=names,
        engine=VllmEngine(
            python=python,
            max_sequences=config.max_sequences,
            chunk_tokens=config.chunk_tokens,
            context_tokens=config.context_tokens,
            arguments=config.engine_args,
        ),
        group=config.group,
        pool=config.pool,
        default_output_tokens=config.default_output_tokens,
        controlled=config.capacity == "adaptive",
        make_assembler=lambda stops: Assembler(tokenizer, stops),
        clock=clock,
    )
    return worker, dict.fromkeys(names, tokenizer)


def model_home() -> Path:
    """Where the built-in model is kept once made: INFERRY_HOME, else the user's cache directory."""
    home = os.environ.get("INFERRY_HOME")
    if home:
        return Path(home) / "models"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "inferry" / "models"
