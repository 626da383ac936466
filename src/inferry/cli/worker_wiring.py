"""Makes workers from their configuration, and gives advice on the engines behind them. Part of the composition root."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from inferry.cli.config.python_functions import function_error
from inferry.cli.config.schema import Config, ConfigError, HealthConfig
from inferry.cli.config.secrets import secret_variable, variable_error
from inferry.cli.config.workers import (
    EmbeddedWorkerConfig,
    HttpWorkerConfig,
    OpenAIWorkerConfig,
    PythonWorkerConfig,
    RayWorkerConfig,
    UnsaltedWorkerConfig,
    VllmInProcessWorkerConfig,
    VllmWorkerConfig,
    WorkerConfig,
)
from inferry.cli.engine_settings import engine_config, resolve_device
from inferry.domain.clock import Clock, SystemClock
from inferry.domain.errors import GatewayError
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ports import Tokenizer, Worker
from inferry.domain.routes import Task
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.engine.bundled import BUNDLED_DIRECTORY, BUNDLED_MODEL, check_bundled_model
from inferry.workers.openai_http.advice import EngineFacts, advice
from inferry.workers.openai_http.profiles import MEDIA_FEATURES, PROFILES, Profile
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker

if TYPE_CHECKING:
    from inferry.domain.workers import ToolFormatName
    from inferry.workers.in_process.engine_link import OpenLink
    from inferry.workers.in_process.vllm_inprocess import VllmEngine


def make_worker(
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
        case PythonWorkerConfig():
            return _python_function(config, clock), {}
        case RayWorkerConfig():
            raise ConfigError(f"worker `{config.name}`: kind ray is for workers of the configuration itself")


def engine_worker(
    config: EmbeddedWorkerConfig | VllmInProcessWorkerConfig, clock: Clock, open_link: "OpenLink"
) -> tuple[Worker, dict[str, Tokenizer]]:
    """A worker whose engine is elsewhere."""
    if isinstance(config, EmbeddedWorkerConfig):
        return _embedded(config, clock, open_link)
    return _vllm_in_process(config, clock, open_link)


def worker_kind(config: WorkerConfig | HttpWorkerConfig) -> str:
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
        profile=_profile(config),
        media_tokens=config.media_tokens,
        models=config.models,
        adapters=config.adapters,
        group=config.group,
        pool=config.pool,
        precision=config.precision,
        output_length=config.output_length,
        kv_packing=config.kv_packing,
        api_key=worker_secret(config, "api_key", config.api_key),
        api_keys=tuple(key for name in keys if (key := worker_secret(config, "api_keys", name))),
        capacity=Capacity(config.max_sequences, config.kv_tokens, config.prefill_tokens),
        wants_priorities=vllm is not None and vllm.engine_priority,
        cache_salts=vllm is not None and vllm.isolation == "salt",
        salt_secret=None if vllm is None else worker_secret(config, "salt_secret", vllm.salt_secret),
        controlled=config.capacity == "adaptive",
        chunk_tokens=config.chunk_tokens,
        context_tokens=config.context_tokens,
        shares_cache=shares_cache(config),
        gpus=config.gpus,
        overflow=isinstance(config, OpenAIWorkerConfig) and config.overflow,
        role="both" if vllm is None else vllm.role,
        min_prefill_tokens=1 if vllm is None else vllm.min_prefill_tokens,
        tasks=None if config.tasks is None else frozenset(Task(name) for name in config.tasks),
        max_inputs=config.max_inputs_per_request,
        connect_timeout_s=config.connect_timeout_s,
        first_token_timeout_s=config.first_token_timeout_s,
        inter_token_timeout_s=config.inter_token_timeout_s,
        liveness_interval_s=health.liveness_interval_s,
        liveness_timeout_s=health.liveness_timeout_s,
    )
    return OpenAIHttpWorker(config.name, settings, clock, lanes)


def shares_cache(config: HttpWorkerConfig) -> bool:
    """Whether tenants share the prefix cache of the server."""
    if not isinstance(config, VllmWorkerConfig | UnsaltedWorkerConfig):
        return False
    return config.pool is None and config.isolation == "none"


def _profile(config: HttpWorkerConfig) -> Profile:
    """The profile of the server's kind, with the media that the configuration names."""
    profile = PROFILES[worker_kind(config)]
    if config.media is None:
        return profile
    return replace(profile, features=profile.features - MEDIA_FEATURES | set(config.media), probes_images=False)


def worker_secret(config: HttpWorkerConfig, field: str, secret: str | None) -> str | None:
    """The secret itself, or the value of the environment variable where it is written as `$NAME`."""
    if secret is None or (variable := secret_variable(secret)) is None:
        return secret
    if (problem := variable_error(field, variable, os.environ)) is not None:
        raise ConfigError(f"worker `{config.name}`: {problem}")
    return os.environ[variable]


def _embedded(
    config: EmbeddedWorkerConfig, clock: Clock, open_link: "OpenLink | None" = None
) -> tuple[Worker, dict[str, Tokenizer]]:
    try:
        if importlib.util.find_spec("torch") is None:  # the engine's process needs it; this one does not
            raise ModuleNotFoundError("no torch", name="torch")
        from inferry.engine.peft_config import read_peft_config
        from inferry.engine.tokenizer import HfTokenizer, HfTokenTexts
        from inferry.streams.detokenizer import Assembler
        from inferry.workers.in_process.embedded import EmbeddedWorker
        from inferry.workers.in_process.logprobs_writer import TokenTexts
        from inferry.workers.in_process.output_formats import OutputFormats
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"worker `{config.name}` is of kind embedded, which needs {error.name}: install the `engine` extra "
            "(pip install 'inferry[engine]', in a clone pip install '.[engine]')"
        ) from None
    directory, names = model_directory(config)
    adapters = {name: Path(path).expanduser() for name, path in config.adapters.items()}
    try:
        tokenizer = HfTokenizer(directory, tool_call_format(config))
        engine = engine_config(config, resolve_device(config.device))
        for path in adapters.values():
            read_peft_config(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"worker `{config.name}`: {error}") from None
    if clashing := sorted(adapters.keys() & set(names)):
        raise ConfigError(f"worker `{config.name}`: adapter {clashing[0]} has the name of the model")
    texts = HfTokenTexts(tokenizer)
    worker = EmbeddedWorker(
        config.name,
        model_dir=directory,
        models=names,
        group=config.group,
        pool=config.pool,
        precision=config.precision,
        output_length=config.output_length,
        kv_packing=config.kv_packing,
        engine=engine,
        gpus=config.gpus,
        default_output_tokens=config.default_output_tokens,
        controlled=config.capacity == "adaptive",
        make_assembler=lambda stops: Assembler(tokenizer, stops),
        clock=clock,
        formats=OutputFormats(tokenizer.tool_format, TokenTexts(texts.text, lambda: Assembler(texts))),
        adapters=adapters,
        adapter_dirs=[Path(path).expanduser() for path in config.adapter_dirs],
        open_link=open_link,
    )
    return worker, dict.fromkeys((*names, *adapters), tokenizer)


def tool_call_format(config: EmbeddedWorkerConfig) -> "ToolFormatName | None":
    """The configured format; None where the model's chat template says."""
    return None if config.tool_call_format == "auto" else config.tool_call_format


def model_directory(config: EmbeddedWorkerConfig | VllmInProcessWorkerConfig) -> tuple[Path, tuple[str, ...]]:
    """The directory of the model and the names it is served under; the bundled model where none is named."""
    if config.model is None:
        try:
            check_bundled_model(BUNDLED_DIRECTORY)
        except ValueError as error:
            raise ConfigError(f"worker `{config.name}`: {error}") from None
        return BUNDLED_DIRECTORY, config.models or (BUNDLED_MODEL,)
    directory = Path(config.model).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(f"worker `{config.name}`: {directory} is not a model directory (no config.json)")
    return directory.absolute(), config.models or (directory.resolve().name,)


def _vllm_in_process(
    config: VllmInProcessWorkerConfig, clock: Clock, open_link: "OpenLink | None" = None
) -> tuple[Worker, dict[str, Tokenizer]]:
    try:
        from inferry.engine.tokenizer import HfTokenizer
        from inferry.streams.detokenizer import Assembler
        from inferry.workers.in_process.vllm_inprocess import VllmInProcessWorker
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"worker `{config.name}` is of kind vllm-inprocess, whose prompts are made here, which needs {error.name}: "
            "install the `engine` extra (pip install 'inferry[engine]', in a clone pip install '.[engine]')"
        ) from None
    directory, names = model_directory(config)
    engine = vllm_engine(config)
    # The interpreter of a replica is on the replica's node.
    if open_link is None and not engine.python.is_file():
        raise ConfigError(
            f"worker `{config.name}`: there is no interpreter {engine.python}; vLLM has a virtual environment of its "
            "own (`make venv-vllm` makes one for CPUs), and `python` says where it is"
        )
    try:
        tokenizer = HfTokenizer(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"worker `{config.name}`: {error}") from None
    worker = VllmInProcessWorker(
        config.name,
        model_dir=directory,
        models=names,
        engine=engine,
        group=config.group,
        pool=config.pool,
        precision=config.precision,
        output_length=config.output_length,
        kv_packing=config.kv_packing,
        gpus=config.gpus,
        default_output_tokens=config.default_output_tokens,
        controlled=config.capacity == "adaptive",
        make_assembler=lambda stops: Assembler(tokenizer, stops),
        clock=clock,
        open_link=open_link,
    )
    return worker, dict.fromkeys(names, tokenizer)


def _python_function(config: PythonWorkerConfig, clock: Clock) -> Worker:
    from inferry.workers.in_process.python_function import FunctionSettings, PythonFunctionWorker

    if (problem := function_error(config)) is not None:
        raise ConfigError(f"worker `{config.name}`: {problem}")
    settings = FunctionSettings(
        function=config.function,
        directory=Path(config.directory).expanduser(),
        model=config.model,
        task=Task(config.task),
        max_batch=config.max_batch,
        call_timeout_s=config.call_timeout_s,
        default_output_tokens=config.default_output_tokens,
        group=config.group,
        pool=config.pool,
        precision=config.precision,
        gpus=config.gpus,
    )
    return PythonFunctionWorker(config.name, settings, clock)


def vllm_engine(config: VllmInProcessWorkerConfig) -> "VllmEngine":
    from inferry.workers.in_process.vllm_inprocess import VllmEngine

    return VllmEngine(
        # Made absolute and not resolved: a virtual environment's interpreter is a link out of it.
        python=Path(config.python).expanduser().absolute(),
        max_sequences=config.max_sequences,
        chunk_tokens=config.chunk_tokens,
        context_tokens=config.context_tokens,
        arguments=config.engine_args,
    )


def advise(config: Config) -> list[str]:
    """Advice from the configuration alone: engine settings that prevent a lane from meeting its SLO targets."""
    lanes = config.lane_policies()
    return [
        message
        for worker in config.workers
        if isinstance(worker, HttpWorkerConfig)
        for message in advice(_configured_facts(worker), lanes)
    ]


async def query_engines(config: Config, clock: Clock | None = None) -> list[str]:
    """The same advice after querying the servers, and the error of each server that cannot be queried."""
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
        kind=worker_kind(worker),
        max_sequences=worker.max_sequences,
        prefill_tokens=worker.prefill_tokens,
        kv_tokens=worker.kv_tokens,
        chunk_tokens=worker.chunk_tokens,
        decodes=not isinstance(worker, VllmWorkerConfig) or worker.role != "prefill",
        shares_cache=shares_cache(worker),
    )
