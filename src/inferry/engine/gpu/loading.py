"""Builds the runner of a model on a device, with a KV cache for the memory that is left."""

from pathlib import Path

import torch

from inferry.engine.config import EngineConfig
from inferry.engine.gpu.decoder import GpuDecoder, tile_queries
from inferry.engine.gpu.graphs import Passes
from inferry.engine.gpu.metadata import Capacity
from inferry.engine.gpu.runner import GpuRunner
from inferry.engine.gpu.weights import GpuWeights, checkpoint_dtype, load_weights
from inferry.engine.loader import read_config
from inferry.engine.model import ModelConfig

GRAPH_BYTES = 2 << 30
"""Kept for captured graphs, compiled kernels and the workspace of cuBLAS."""


def load_runner(model_dir: Path, config: EngineConfig, device: torch.device) -> GpuRunner:
    model = read_config(model_dir, context_tokens=config.context_tokens)
    weights = load_weights(model_dir, model, checkpoint_dtype(model_dir), device)
    return build_runner(model, weights, config, device)


def build_runner(model: ModelConfig, weights: GpuWeights, config: EngineConfig, device: torch.device) -> GpuRunner:
    """Allocate everything, then capture the passes. On the CPU, for tests, nothing is captured."""
    capacity = step_capacity(model, config, weights.dtype)
    decoder = GpuDecoder(model, weights, capacity, blocks=config.blocks, device=device)
    passes = Passes(decoder)
    if device.type == "cuda":
        passes.capture()
    return GpuRunner(decoder, passes, weights.score)


def step_capacity(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> Capacity:
    longest = -(-min(model.context_tokens, config.kv_tokens) // config.block_tokens) + 1
    return Capacity(
        rows=config.chunk_tokens + config.max_sequences,
        pieces=config.max_sequences,
        blocks=longest * config.max_sequences,
        tile_queries=tile_queries(model, dtype),
        block_tokens=config.block_tokens,
    )


def kv_tokens_for(model: ModelConfig, weights: GpuWeights, config: EngineConfig, memory_fraction: float) -> int:
    """Tokens of KV cache that fit into this fraction of the device's memory, beside everything else."""
    free, total = torch.cuda.mem_get_info()
    size = weights.dtype.itemsize
    budget = memory_fraction * total - (total - free) - workspace_bytes(model, config, size) - GRAPH_BYTES
    per_token = 2 * model.layers * model.kv_heads * model.head_dim * size
    return max(config.block_tokens, int(budget) // per_token // config.block_tokens * config.block_tokens)


def workspace_bytes(model: ModelConfig, config: EngineConfig, size: int) -> int:
    """Memory of a step besides weights and KV cache; `size`: bytes of one value."""
    rows = config.chunk_tokens + config.max_sequences
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    per_row = 3 * model.hidden + heads + 3 * model.intermediate
    splits = 4 * 4 * config.max_sequences * model.heads * (model.head_dim + 1)
    return size * (rows * per_row + config.max_sequences * model.vocab_size) + splits
