"""What the engine makes of a model directory: dimensions, what is missing or unsupported, and the memory it needs."""

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from inferry.domain.routes import Task
from inferry.engine.checkpoint import (
    UnsupportedModel,
    family_of,
    read_config,
    read_raw,
    stored_dtype,
    unsupported,
)
from inferry.engine.config import Device, EngineConfig
from inferry.engine.dtypes import resolve_dtype
from inferry.engine.loader import StoredTensors
from inferry.engine.memory import MemoryModel, Sizing
from inferry.engine.model import ModelConfig
from inferry.engine.rope import rope_settings
from inferry.engine.tokenizer import HfTokenizer

_CONTEXTS = (2_048, 8_192, 32_768, 131_072)


class ModelReport(Struct, frozen=True, kw_only=True):
    """The result of a check. `unsupported`: why the engine would refuse the model; `missing`: what its directory lacks.

    Dimensions and memory are None for a model that is not supported.
    """

    directory: str
    architecture: str
    family: str | None
    dtype: str
    rope: str
    unsupported: tuple[str, ...]
    missing: tuple[str, ...]
    has_tokenizer: bool
    has_chat_template: bool
    tasks: tuple[str, ...] = ()
    dimensions: dict[str, int | None] | None = None
    memory: "MemoryReport | None" = None

    @property
    def is_usable(self) -> bool:
        fits = self.memory is not None and self.memory.recommended is not None
        return not self.unsupported and not self.missing and fits


class MemoryReport(Struct, frozen=True, kw_only=True):
    """Memory in bytes. `recommended`: settings for a worker that fill the budget, None if the model does not fit.

    `sequences_by_tokens`: how many calls of this many tokens fit into the recommended KV cache at once.
    """

    device: str
    dtype: str
    device_bytes: int
    budget_bytes: int
    weight_bytes: int
    kv_token_bytes: int
    adapter_bytes: int | None = None
    kv_cache_bytes: int | None = None
    workspace_bytes: int | None = None
    graph_bytes: int | None = None
    runtime_bytes: int | None = None
    total_bytes: int | None = None
    recommended: dict[str, int] | None = None
    sequences_by_tokens: dict[int, int] = {}


class Budget(Struct, frozen=True, kw_only=True):
    """The device that a model is checked for. `call_tokens`: expected prompt and output tokens of a call."""

    device: Device
    device_bytes: int
    share: float
    call_tokens: int


def check_model(directory: Path, config: EngineConfig, budget: Budget) -> ModelReport:
    """Check a model directory without loading it. Raises UnsupportedModel if it has no readable config.json."""
    raw = read_raw(directory)
    missing = _missing_weights(directory)
    tokenizer: HfTokenizer | None = None
    try:
        tokenizer = HfTokenizer(directory)
    except (OSError, ValueError) as error:
        missing.append(str(error))
    report = ModelReport(
        directory=str(directory),
        architecture=str((raw.get("architectures") or ["(none named)"])[0]),
        family=family_of(raw),
        dtype=stored_dtype(raw),
        rope=str(rope_settings(raw)["rope_type"]),
        unsupported=tuple(unsupported(directory, raw)),
        missing=tuple(missing),
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
    )
    if report.unsupported:
        return report
    model = read_config(directory, context_tokens=config.context_tokens)
    return replace(
        report,
        tasks=tuple(sorted(task.value for task in model.tasks)),
        dimensions=_dimensions(model),
        memory=_memory(model, config, budget),
    )


def _missing_weights(directory: Path) -> list[str]:
    try:
        StoredTensors(directory)
    except UnsupportedModel as error:
        return [str(error)]
    return []


def _dimensions(model: ModelConfig) -> dict[str, int | None]:
    names = (
        "layers",
        "hidden",
        "intermediate",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab_size",
        "context_tokens",
        "window",
    )
    return {name: getattr(model, name) for name in names}


def _memory(model: ModelConfig, config: EngineConfig, budget: Budget) -> MemoryReport:
    dtype = resolve_dtype(config.dtype, model.dtype, budget.device)
    memory = MemoryModel(model, dtype, budget.device)
    report = MemoryReport(
        device=budget.device,
        dtype=dtype,
        device_bytes=budget.device_bytes,
        budget_bytes=int(budget.share * budget.device_bytes),
        weight_bytes=memory.weight_bytes,
        kv_token_bytes=memory.kv_token_bytes,
    )
    size = memory.size(config, report.budget_bytes, budget.call_tokens)
    return report if size is None else _sized(report, size, model, config.block_tokens)


def _sized(report: MemoryReport, size: Sizing, model: ModelConfig, block_tokens: int) -> MemoryReport:
    settings = {"kv_tokens": size.kv_tokens, "context_tokens": size.context_tokens}
    if Task.GENERATE in model.tasks:
        settings["max_sequences"] = size.max_sequences
    lengths = [tokens for tokens in _CONTEXTS if tokens < size.context_tokens] + [size.context_tokens]
    return replace(
        report,
        adapter_bytes=size.estimate.adapters,
        kv_cache_bytes=size.estimate.kv_cache,
        workspace_bytes=size.estimate.workspace,
        graph_bytes=size.estimate.graphs,
        runtime_bytes=size.estimate.runtime,
        total_bytes=size.estimate.total,
        recommended=settings,
        sequences_by_tokens={
            tokens: size.kv_tokens // (-(-tokens // block_tokens) * block_tokens) for tokens in lengths
        },
    )
