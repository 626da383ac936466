"""The composition root: configuration in, objects out. The only module that imports adapters."""

import asyncio
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from inferry.adapters.ledgers import lock
from inferry.adapters.ledgers.marks import SqliteMarks
from inferry.adapters.ledgers.queries import LedgerQueries
from inferry.adapters.ledgers.sqlite import LedgerUnusable, SqliteLedger, open_sqlite_queries
from inferry.adapters.ledgers.tenants import SqliteTenants
from inferry.adapters.workers.advice import Facts, advice
from inferry.adapters.workers.openai_http import OpenAIHttpWorker
from inferry.adapters.workers.profiles import PROFILES
from inferry.adapters.workers.values import HttpWorkerSettings
from inferry.admission.door import Door
from inferry.admission.gate import Gate
from inferry.admission.marks import Marks
from inferry.config import (
    Config,
    ConfigError,
    EmbeddedWorkerConfig,
    HealthConfig,
    HttpWorkerConfig,
    OpenAIWorkerConfig,
    SharingConfig,
    VllmInProcessWorkerConfig,
    VllmWorkerConfig,
    WorkerConfig,
    load_workers,
    parse_workers,
    taken_names,
)
from inferry.dispatch.accounts import Accounts
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.mark_keeper import MarkKeeper
from inferry.dispatch.pool import Pool
from inferry.dispatch.tenants import TenantBook, TenantWatch
from inferry.dispatch.values import HealthPolicy, Sharing
from inferry.dispatch.watch import Fleet, FleetWatch, Unusable, WatchedFile
from inferry.domain.clock import Clock, SystemClock
from inferry.domain.errors import GatewayError
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger_urls import IN_MEMORY
from inferry.domain.ports import Tokenizer, Worker
from inferry.domain.spending import Spent
from inferry.domain.workers import Room
from inferry.ingress.app import App
from inferry.ingress.auth import Auth
from inferry.ingress.values import Limits
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics

log = logging.getLogger(__name__)

BUILT_IN_MODEL = "inferry-tiny"


class Service(NamedTuple):
    """What `serve` runs."""

    app: App
    gateway: Gateway
    pool: Pool
    tenants: TenantWatch
    accounts: Accounts
    watch: FleetWatch[WorkerConfig] | None = None

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
def sole_use(config: Config) -> Iterator[None]:
    """Keep every other gateway away from the configuration's ledger. Raises ConfigError where one is there already."""
    with ExitStack() as held:
        try:
            held.enter_context(lock.sole_use(config.ledger))
        except LedgerUnusable as error:
            raise ConfigError(str(error)) from None
        yield


def build(config: Config, clock: Clock | None = None) -> Service:
    """Everything, wired. Must be called on the event loop that will run it; nothing has started yet."""
    clock = clock or SystemClock()
    workers: list[Worker] = []
    tokenizers: dict[str, Tokenizer] = {}
    watched = _watched_workers(config)
    kinds: dict[str, str] = {}
    for one in (*config.workers, *watched.values()):
        worker, found = _worker(one, clock, config.lane_policies(), config.health)
        workers.append(worker)
        tokenizers.update(found)
        kinds[one.name] = _kind(one)
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
    tenants = TenantWatch(
        TenantBook(SqliteTenants(config.ledger), config.configured_tenants()),
        config.auth.mode,
        wall=clock.wall,
    )
    book = _book(config.ledger)
    # What is in memory is gone with the process, and so are its budgets: there is nothing to keep.
    marks = None if config.ledger == IN_MEMORY else SqliteMarks(config.ledger)
    gate = Gate(config.price_list(), marks=None if marks is None else Marks())
    recorder = Recorder(ledger)
    if book is not None:
        gate.restore(book.spent(clock.wall()), clock.now())
    keeper = None if marks is None else MarkKeeper(gate, marks, recorder, clock)
    pool = Pool(workers, clock, health=policy, kinds=kinds)
    models = {model for worker in workers for model in worker.view().models}
    metrics = Metrics(models, [worker.name for worker in workers])
    metrics.watch(health=pool.health, ledger_up=lambda: float(tenants.gone is None))
    gateway = Gateway(
        lanes=config.lane_policies(),
        pool=pool,
        recorder=recorder,
        metrics=metrics,
        clock=clock,
        tokenizers=tokenizers,
        gate=gate,
        marks=keeper,
        sharing=_sharing(config.sharing),
        door=Door(
            config.lane_policies(),
            max_queued_bytes=config.server.max_queued_bytes,
            keeps_turns=config.server.keep_turns,
        ),
    )
    if book is not None:
        since = clock.wall() - gateway.entrance.runs.tombstone_s
        gateway.entrance.runs.restore(book.cancelled_runs(since), clock.now())
    limits = Limits(
        max_body_bytes=config.server.max_body_bytes,
        body_timeout_s=config.server.body_timeout_s,
        heartbeat_s=config.server.heartbeat_s,
        max_unread_bytes=config.server.max_unread_bytes,
    )
    auth = Auth(tenants, off_for_all=config.auth.off_beyond_loopback, wall=clock.wall)
    app = App(
        gateway,
        metrics,
        limits,
        auth,
        admin_key=config.server.admin_key,
        tenants=tenants,
        book=book,
        problem=lambda: tenants.gone,
    )
    accounts = Accounts(gate, clock, lambda: _spent(config.ledger, clock.wall()))
    tenants.on_change = accounts.catch_up

    def end_unwelcome() -> None:
        ended = gateway.end_unwelcome(tenants.problem)
        if ended:
            log.warning("ended %d calls in flight: their keys are no longer valid", ended)

    def start_over() -> None:
        if keeper is not None:
            keeper.start_over()
        app.read_from(lambda: _book(config.ledger))

    tenants.on_ended = end_unwelcome
    tenants.on_replaced = start_over
    return Service(app, gateway, pool, tenants, accounts)


def _spent(ledger: str, wall: float) -> list[Spent]:
    """What everybody has spent, read with a connection of its own."""
    book = _book(ledger)
    if book is None:
        return []
    with book:
        return book.spent(wall)


def _book(ledger: str) -> LedgerQueries | None:
    """The read side of the ledger; None for one in memory, which has none."""
    try:
        return open_sqlite_queries(ledger)
    except LedgerUnusable:
        return None


def _sharing(config: SharingConfig) -> Sharing:
    return Sharing(
        identical=config.identical,
        linger_s=config.linger_ms / 1000,
        keep_s=config.keep_s,
        keep_bytes=config.keep_bytes,
        history_bytes=config.history_bytes,
    )


def _watched_workers(config: Config) -> dict[str, WorkerConfig]:
    """What the configuration's `workers_file` holds now; nothing where there is none."""
    if config.workers_file is None:
        return {}
    return _by_name(config, load_workers(Path(config.workers_file)))


def _by_name(config: Config, workers: Sequence[WorkerConfig]) -> dict[str, WorkerConfig]:
    taken = taken_names(config, workers)
    if taken:
        raise ConfigError(f"{config.workers_file}: the configuration has workers of its own named {', '.join(taken)}")
    return {worker.name: worker for worker in workers}


def _watch(
    config: Config,
    service: Service,
    watched: dict[str, WorkerConfig],
    tokenizers: dict[str, Tokenizer],
    clock: Clock,
) -> FleetWatch[WorkerConfig]:
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
            raise Unusable(str(error)) from None
        tokenizers.update(found)
        return worker, _kind(entry)

    def read(content: bytes) -> dict[str, WorkerConfig]:
        try:
            return _by_name(config, parse_workers(content))
        except ConfigError as error:
            raise Unusable(str(error)) from None

    fleet = Fleet(service.pool, make, watched, grace_s=config.server.drain_grace_s)
    return FleetWatch(WatchedFile(Path(config.workers_file)), read, fleet)


def _kind(config: WorkerConfig | HttpWorkerConfig) -> str:
    return str(config.__struct_config__.tag)


def over_http(
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
        room=Room(config.max_sequences, config.kv_tokens, config.prefill_tokens),
        asks_for_priorities=vllm is not None and vllm.engine_priority,
        salts=vllm is not None and vllm.isolation == "salt",
        salt_secret=None if vllm is None else _secret(config, vllm.salt_secret),
        controlled=config.room == "adaptive",
        chunk_tokens=config.chunk_tokens,
        connect_timeout_s=config.connect_timeout_s,
        silence_timeout_s=config.silence_timeout_s,
        gap_timeout_s=config.gap_timeout_s,
        liveness_interval_s=health.liveness_interval_s,
        liveness_timeout_s=health.liveness_timeout_s,
    )
    return OpenAIHttpWorker(config.name, settings, clock, lanes)


def advise(config: Config) -> list[str]:
    """What the configuration alone says about engines that stand in the way of a promise."""
    lanes = config.lane_policies()
    return [
        sentence
        for worker in config.workers
        if isinstance(worker, HttpWorkerConfig)
        for sentence in advice(_configured_facts(worker), lanes)
    ]


async def ask_engines(config: Config, clock: Clock | None = None) -> list[str]:
    """The same after asking the servers themselves, and what keeps one from being asked."""
    lanes = config.lane_policies()
    said: list[str] = []
    for one in config.workers:
        if isinstance(one, HttpWorkerConfig):
            worker = over_http(one, clock or SystemClock(), lanes)
            try:
                await worker.start()
                said += advice(worker.facts(), lanes)
            except GatewayError as error:
                said += [f"worker {one.name}: {error.message}", *advice(_configured_facts(one), lanes)]
            finally:
                await worker.close()
    return said


def _configured_facts(worker: HttpWorkerConfig) -> Facts:
    return Facts(
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
            return over_http(config, clock, lanes, health), {}


def _embedded(config: EmbeddedWorkerConfig, clock: Clock) -> tuple[Worker, dict[str, Tokenizer]]:
    try:
        if importlib.util.find_spec("torch") is None:  # the engine's process needs it; this one does not
            raise ModuleNotFoundError("no torch", name="torch")
        from inferry.adapters.workers.embedded import EmbeddedWorker
        from inferry.engine.config import EngineConfig
        from inferry.engine.tiny import ensure_tiny_model
        from inferry.engine.tokenizer import HfTokenizer
        from inferry.streams.assembler import Assembler
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
        controlled=config.room == "adaptive",
        make_assembler=lambda stops: Assembler(tokenizer, stops),
        clock=clock,
    )
    return worker, dict.fromkeys(names, tokenizer)


def _vllm_in_process(config: VllmInProcessWorkerConfig, clock: Clock) -> tuple[Worker, dict[str, Tokenizer]]:
    try:
        from inferry.adapters.workers.vllm_inprocess import VllmEngine, VllmInProcessWorker
        from inferry.engine.tokenizer import HfTokenizer
        from inferry.streams.assembler import Assembler
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
        controlled=config.room == "adaptive",
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
