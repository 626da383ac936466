"""Builds the runner of a model on a device, with a KV cache for the memory that is left."""

from pathlib import Path

import torch

from inferry.engine.checkpoint import read_config
from inferry.engine.config import EngineConfig
from inferry.engine.dtypes import resolve_dtype
from inferry.engine.gpu.adapters import GpuAdapters
from inferry.engine.gpu.decoder import GpuDecoder, tile_queries
from inferry.engine.gpu.graphs import Passes
from inferry.engine.gpu.metadata import Capacity
from inferry.engine.gpu.runner import GpuRunner
from inferry.engine.gpu.weights import GpuWeights, load_weights
from inferry.engine.memory import RUNTIME_BYTES, MemoryModel, fitted
from inferry.engine.model import ModelConfig

CUDA = torch.device("cuda")


def fitted_to_gpu(model_dir: Path, config: EngineConfig) -> EngineConfig:
    """The configuration with a size of the KV cache that fits into the GPU's free memory, or OutOfMemory.

    `kv_tokens` of `auto` leave the part of the memory beyond `memory_share` free, whatever other processes use.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("device cuda: torch finds no GPU")
    model = read_config(model_dir, context_tokens=config.context_tokens)
    memory = MemoryModel(model, resolve_dtype(config.dtype, model.dtype, "cuda"), "cuda")
    free, total = torch.cuda.mem_get_info()
    kept_free = (1 - config.memory_share) * total if config.kv_tokens == "auto" else 0.0
    # The context of this process is not part of what is free any more.
    return fitted(memory, config, total, int(free + RUNTIME_BYTES["cuda"] - kept_free))


def load_runner(model_dir: Path, config: EngineConfig, device: torch.device) -> GpuRunner:
    """The runner of a checkpoint. `kv_tokens` must be a number."""
    model = read_config(model_dir, context_tokens=config.context_tokens)
    dtype: torch.dtype = getattr(torch, resolve_dtype(config.dtype, model.dtype, "cuda"))
    return build_runner(model, load_weights(model_dir, model, dtype, device), config, device)


def build_runner(model: ModelConfig, weights: GpuWeights, config: EngineConfig, device: torch.device) -> GpuRunner:
    """Allocate everything, then capture the passes. On the CPU, for tests, nothing is captured."""
    capacity = step_capacity(model, config, weights.dtype)
    adapters = GpuAdapters(model, config, capacity.rows, weights.dtype, device) if config.max_adapters else None
    decoder = GpuDecoder(model, weights, capacity, blocks=config.cache_blocks, device=device, adapters=adapters)
    passes = Passes(decoder)
    if device.type == "cuda":
        passes.capture()
    return GpuRunner(decoder, passes, weights.score)


def step_capacity(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> Capacity:
    longest = -(-min(model.context_tokens, config.blocks * config.block_tokens) // config.block_tokens) + 1
    return Capacity(
        rows=config.chunk_tokens + config.max_sequences,
        pieces=config.max_pieces,
        blocks=longest * config.max_pieces,
        tile_queries=tile_queries(model, dtype),
        block_tokens=config.block_tokens,
        adapters=config.max_adapters,
    )
