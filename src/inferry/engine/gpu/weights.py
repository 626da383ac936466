"""Weights of a decoder on the device, in the precision of the checkpoint.

Only projections of one input are joined. Norms and scales stay apart: multiplied into a matrix of bfloat16 they would
be rounded, and outputs would differ from transformers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from inferry.domain.routes import Task
from inferry.engine.checkpoint import UnsupportedModel, check_head, weight_files
from inferry.engine.gpu.kernels.rotary import HeadNorms
from inferry.engine.model import ModelConfig


@dataclass(frozen=True)
class GpuLayer:
    """One layer. Every matrix is [out, in]; `qkv` has the rows of q, k and v; `gate_up` those of gate and up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class GpuWeights:
    """`head` is None for a model that samples no tokens; `score` is the classification head of such a model."""

    embedding: Tensor
    layers: tuple[GpuLayer, ...]
    final_norm: Tensor
    head: Tensor | None = None
    score: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> GpuWeights:
    """Read the checkpoint to the device."""
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors(directory, device)}
    return _build(config, tensors)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> GpuWeights:
    """Weights of the right shapes, with the spread that checkpoints have before training."""
    generator = torch.Generator(device=device).manual_seed(seed)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.empty(rows, columns, dtype=dtype, device=device)
        return values.normal_(0.0, 0.02, generator=generator)

    ones = torch.ones(config.hidden, dtype=dtype, device=device)
    layers = tuple(
        GpuLayer(
            input_norm=ones,
            qkv=matrix(queries + 2 * keys, config.hidden),
            qkv_bias=None,
            head_norms=None,
            out=matrix(config.hidden, queries),
            out_bias=None,
            post_norm=ones,
            gate_up=matrix(2 * config.intermediate, config.hidden),
            down=matrix(config.hidden, config.intermediate),
        )
        for _ in range(config.layers)
    )
    embedding, head = (matrix(config.vocab_size, config.hidden) for _ in range(2))
    return GpuWeights(embedding, layers, ones, head)


def _tensors(directory: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(directory):
        with safe_open(str(path), framework="pt", device=str(device)) as stored:
            for key in stored.keys():  # noqa: SIM118 (not a dict)
                yield key, stored.get_tensor(key)


def _build(config: ModelConfig, tensors: dict[str, Tensor]) -> GpuWeights:
    def take(name: str) -> Tensor:
        if name not in tensors:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        return tensors.pop(name)

    def maybe(name: str) -> Tensor | None:
        return tensors.pop(name, None)

    # A checkpoint of the base model alone may omit the prefix.
    prefix = "model." if "model.embed_tokens.weight" in tensors or Task.EMBED not in config.tasks else ""
    embedding = take(f"{prefix}embed_tokens.weight")
    layers = tuple(_layer(config, f"{prefix}layers.{index}.", take, maybe) for index in range(config.layers))
    final_norm = take(f"{prefix}norm.weight")
    head = maybe("lm_head.weight")
    score = None
    if Task.EMBED not in config.tasks:
        score = take("score.weight")
        check_head(config, len(score))
    unused = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
    if unused:
        raise UnsupportedModel(f"unknown tensors, for example {unused[0]}")
    if Task.GENERATE in config.tasks and head is None:
        head = embedding
    return GpuWeights(embedding, layers, final_norm, head, score)


def _layer(
    config: ModelConfig, prefix: str, take: Callable[[str], Tensor], maybe: Callable[[str], Tensor | None]
) -> GpuLayer:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    biases = [maybe(f"{attention}{name}_proj.bias") for name in "qkv"]
    present = [bias for bias in biases if bias is not None]
    query_norm, key_norm = maybe(attention + "q_norm.weight"), maybe(attention + "k_norm.weight")
    norms = None
    if query_norm is not None and key_norm is not None:
        norms = HeadNorms(query_norm, key_norm, config.norm_eps)
    return GpuLayer(
        input_norm=take(prefix + "input_layernorm.weight"),
        qkv=torch.cat([take(f"{attention}{name}_proj.weight") for name in "qkv"]),
        qkv_bias=torch.cat(present) if present else None,
        head_norms=norms,
        out=take(attention + "o_proj.weight"),
        out_bias=maybe(attention + "o_proj.bias"),
        post_norm=take(prefix + "post_attention_layernorm.weight"),
        gate_up=torch.cat([take(mlp + "gate_proj.weight"), take(mlp + "up_proj.weight")]),
        down=take(mlp + "down_proj.weight"),
    )
