"""Builds the engine's runner for a profile, with the weights of a checkpoint or random ones of its shape."""

from pathlib import Path

import torch
from torch import Tensor

from inferry.engine.checkpoint import read_config
from inferry.engine.config import EngineConfig
from inferry.engine.model import Decoder, LayerWeights, ModelConfig, Weights
from inferry.engine.runner import TorchRunner, cpu_dtype, fitted_to_cpu
from inferry.engine.runners import Runner


def profiled_runner(model_dir: Path, config: EngineConfig, *, is_random: bool) -> Runner:
    """The runner of the configured device. Raises OutOfMemory, UnsupportedModel and UnsupportedDtype."""
    if config.device == "cuda":
        # Imported here: the CPU's engine works without triton.
        from inferry.engine.dtypes import resolve_dtype
        from inferry.engine.gpu.loading import CUDA, build_runner, fitted_to_gpu, load_runner
        from inferry.engine.gpu.weights import random_weights

        config = fitted_to_gpu(model_dir, config)
        if not is_random:
            return load_runner(model_dir, config, CUDA)
        model = read_config(model_dir, context_tokens=config.context_tokens)
        dtype: torch.dtype = getattr(torch, resolve_dtype(config.dtype, model.dtype, "cuda"))
        return build_runner(model, random_weights(model, dtype, CUDA), config, CUDA)
    config = fitted_to_cpu(model_dir, config)
    if not is_random:
        return TorchRunner.load(model_dir, config)
    model = read_config(model_dir, context_tokens=config.context_tokens)
    weights = _random_weights(model, getattr(torch, cpu_dtype(config)))
    decoder = Decoder(model, weights, blocks=config.cache_blocks, block_tokens=config.block_tokens)
    return TorchRunner(decoder, config.block_tokens)


def _random_weights(model: ModelConfig, dtype: torch.dtype) -> Weights:
    """Weights of the CPU's layout, with the spread that checkpoints have before training."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype).normal_(0.0, 0.02, generator=generator)

    def layer() -> LayerWeights:
        return LayerWeights(
            qkv=matrix(model.hidden, queries + 2 * keys),
            qkv_bias=torch.zeros(queries + 2 * keys, dtype=dtype) if model.has_qkv_bias else None,
            qk_norm=torch.ones(model.heads + model.kv_heads, model.head_dim) if model.has_qk_norm else None,
            out=matrix(queries, model.hidden),
            out_bias=torch.zeros(model.hidden, dtype=dtype) if model.has_out_bias else None,
            gate_up=matrix(model.hidden, 2 * model.intermediate),
            down=matrix(model.intermediate, model.hidden),
        )

    return Weights(
        embedding=matrix(model.vocab_size, model.hidden),
        layers=tuple(layer() for _ in range(model.layers)),
        final_norm=torch.full((model.hidden,), model.hidden**0.5),
        head=matrix(model.hidden, model.vocab_size),
    )
