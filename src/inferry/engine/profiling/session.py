"""One profile: probe the device, build the runner, measure every batch size."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from msgspec import Struct
from msgspec.structs import asdict, replace

from inferry.domain.routes import Task
from inferry.engine.checkpoint import UnsupportedModel, read_config
from inferry.engine.config import EngineConfig
from inferry.engine.dtypes import resolve_dtype
from inferry.engine.memory import DTYPE_BYTES, MemoryModel, OutOfMemory
from inferry.engine.model import ModelConfig
from inferry.engine.profiling.measure import blocks_of, measure_step, work_of
from inferry.engine.profiling.probes import device_name, measure_peak
from inferry.engine.profiling.result import Point, Profile, make_point
from inferry.engine.profiling.roofline import (
    Piece,
    decode_pieces,
    measured_transition,
    prefill_pieces,
    product_transition,
    roofline_transition,
    step_work,
)
from inferry.engine.profiling.runners import profiled_runner
from inferry.engine.runner import cpu_dtype, set_threads

Phase = Literal["decode", "prefill"]
_DIMENSIONS = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab_size", "context_tokens")


class ProfileSettings(Struct, frozen=True, kw_only=True):
    """What is measured. `context_tokens`: tokens that a sequence of a decode step sees."""

    batch_sizes: tuple[int, ...]
    context_tokens: int
    prompt_tokens: int
    steps: int


def run_profile(
    model_dir: Path,
    config: EngineConfig,
    settings: ProfileSettings,
    *,
    is_random: bool,
    on_point: Callable[[Point], None] = lambda _: None,
) -> Profile:
    """Profile a model with the limits of `config`; its batch and KV cache are sized by what is measured.

    Raises UnsupportedModel, UnsupportedDtype and OutOfMemory.
    """
    threads = set_threads(config.threads)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    model = read_config(model_dir)
    _check(model, settings)
    steps = list(_steps(settings, config.chunk_tokens))
    blocks = max(blocks_of(pieces, config.block_tokens) for _, _, pieces in steps)
    config = replace(config, kv_tokens=blocks * config.block_tokens, max_sequences=max(settings.batch_sizes))
    # Checked before the probe: on some CPUs a product in bfloat16 ends the process.
    dtype = cpu_dtype(config) if config.device == "cpu" else resolve_dtype(config.dtype, model.dtype, "cuda")
    value_bytes = DTYPE_BYTES[dtype]
    try:
        peak = measure_peak(config.device, getattr(torch, dtype))
        runner = profiled_runner(model_dir, config, is_random=is_random)
        points = []
        for phase, batch, pieces in steps:
            work = work_of(pieces, config.block_tokens, model.vocab_size)
            step_s, spent = measure_step(runner, work, settings.steps)
            rows = sum(piece.tokens for piece in pieces)
            points.append(make_point(phase, batch, rows, step_s, step_work(model, pieces, value_bytes), peak, spent))
            on_point(points[-1])
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(str(error).split("\n")[0]) from None
    products = [(point.batch, point.seconds_by_class["matmul"]) for point in points if point.phase == "decode"]
    return Profile(
        model=model_dir.resolve().name,
        device=config.device,
        device_name=device_name(config.device),
        dtype=dtype,
        is_random=is_random,
        at=started,
        settings={**asdict(settings), "chunk_tokens": config.chunk_tokens, "threads": threads},
        dimensions={name: getattr(model, name) for name in _DIMENSIONS},
        weight_bytes=MemoryModel(model, dtype, config.device).weight_bytes,
        peak=peak,
        points=tuple(points),
        roofline_transition=roofline_transition(model, settings.context_tokens, value_bytes, peak),
        product_transition=product_transition(value_bytes, peak),
        measured_product_transition=measured_transition(products),
    )


def _check(model: ModelConfig, settings: ProfileSettings) -> None:
    if Task.GENERATE not in model.tasks:
        raise UnsupportedModel("the model does not generate: only models with a head for tokens are profiled")
    longest = max(settings.context_tokens, settings.prompt_tokens)
    if longest > model.context_tokens:
        raise UnsupportedModel(f"{longest:,} tokens are above the model's context of {model.context_tokens:,}")


def _steps(settings: ProfileSettings, chunk_tokens: int) -> Iterator[tuple[Phase, int, list[Piece]]]:
    """Decode steps of every batch size; prefill steps until a chunk is full."""
    for batch in settings.batch_sizes:
        yield "decode", batch, decode_pieces(batch, settings.context_tokens)
    for batch in settings.batch_sizes:
        yield "prefill", batch, prefill_pieces(batch, settings.prompt_tokens, chunk_tokens)
        if batch * settings.prompt_tokens >= chunk_tokens:
            return
