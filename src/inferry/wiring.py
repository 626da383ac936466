"""The composition root: configuration in, objects out. The only module that imports adapters."""

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from inferry.adapters.ledgers.sqlite import LedgerUnusable, SqliteLedger
from inferry.adapters.workers.openai_http import HttpWorkerSettings, OpenAIHttpWorker
from inferry.config import Config, ConfigError, EmbeddedWorkerConfig, VllmWorkerConfig, WorkerConfig
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.domain.clock import Clock, SystemClock
from inferry.domain.plans import Room
from inferry.domain.ports import Tokenizer, Worker
from inferry.ingress.app import App, Limits
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics

log = logging.getLogger(__name__)

BUILT_IN_MODEL = "inferry-tiny"


class Service(NamedTuple):
    """What `serve` runs."""

    app: App
    gateway: Gateway
    pool: Pool


def build(config: Config, clock: Clock | None = None) -> Service:
    """Everything, wired. Must be called on the event loop that will run it; nothing has started yet."""
    clock = clock or SystemClock()
    workers: list[Worker] = []
    tokenizers: dict[str, Tokenizer] = {}
    for one in config.workers:
        worker, found = _worker(one, clock)
        workers.append(worker)
        tokenizers.update(found)
    return assemble(config, workers, tokenizers, clock)


def assemble(config: Config, workers: Sequence[Worker], tokenizers: dict[str, Tokenizer], clock: Clock) -> Service:
    """The service around given workers."""
    try:
        ledger = SqliteLedger(config.ledger)
    except LedgerUnusable as error:
        raise ConfigError(str(error)) from None
    pool = Pool(workers, clock)
    models = {model for worker in workers for model in worker.view().models}
    metrics = Metrics(models, [worker.name for worker in workers])
    gateway = Gateway(
        lanes=config.lane_policies(),
        pool=pool,
        recorder=Recorder(ledger),
        metrics=metrics,
        clock=clock,
        tokenizers=tokenizers,
    )
    limits = Limits(
        max_body_bytes=config.server.max_body_bytes,
        body_timeout_s=config.server.body_timeout_s,
        heartbeat_s=config.server.heartbeat_s,
        max_unread_bytes=config.server.max_unread_bytes,
    )
    return Service(App(gateway, metrics, limits), gateway, pool)


def _worker(config: WorkerConfig, clock: Clock) -> tuple[Worker, dict[str, Tokenizer]]:
    match config:
        case EmbeddedWorkerConfig():
            return _embedded(config, clock)
        case VllmWorkerConfig():
            settings = HttpWorkerSettings(
                url=config.url.rstrip("/").removesuffix("/v1"),
                models=config.models,
                group=config.group,
                api_key=config.api_key,
                room=Room(config.max_sequences, config.kv_tokens, config.prefill_tokens),
                asks_for_priorities=config.engine_priority,
                controlled=config.room == "adaptive",
                chunk_tokens=config.chunk_tokens,
                connect_timeout_s=config.connect_timeout_s,
                silence_timeout_s=config.silence_timeout_s,
            )
            return OpenAIHttpWorker(config.name, settings, clock), {}


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
        engine=engine,
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
