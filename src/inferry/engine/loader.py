"""Loads the weights of a Hugging Face model directory in the layout of `engine.model`.

Tensors are read one at a time, and every matrix is written to its place in its final dtype and layout: beside the
loaded weights there is never more than one stored tensor and a slice of it in float32. The embedding and the head are
the largest tensors and are loaded first, while little else is held.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from inferry.domain.routes import Task
from inferry.engine.checkpoint import UnsupportedModel, read_config
from inferry.engine.model import LayerWeights, ModelConfig, Weights

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Rows of a matrix that are transformed at once, in float32.
_SLICE_ROWS = 4096


def load_model(
    directory: Path,
    *,
    context_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[ModelConfig, Weights]:
    """Load config and weights. `context_tokens` lowers the model's context. Weights are converted to `dtype`."""
    config = read_config(directory, context_tokens=context_tokens)
    return config, _Loader(config, StoredTensors(directory), dtype, device).load()


class StoredTensors:
    """The tensors of a checkpoint by name. `take` reads each once.

    A file is mapped for every tensor anew, because mapped pages that were read count as memory of the process until
    the last tensor of their mapping is freed.
    """

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (directory / "model.safetensors").is_file():
            files = ["model.safetensors"]
        else:
            raise UnsupportedModel(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
        self._files: dict[str, Path] = {}
        for name in files:
            if not (directory / name).is_file():
                raise UnsupportedModel(f"{directory} has no {name}, which model.safetensors.index.json names")
            with safe_open(str(directory / name), framework="pt") as stored:
                self._files |= dict.fromkeys(stored.keys(), directory / name)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str) -> Tensor:
        if name not in self._files:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        with safe_open(str(self._files.pop(name)), framework="pt") as stored:
            tensor: Tensor = stored.get_tensor(name)
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModel(f"tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}")
        return tensor

    def take_if_present(self, name: str) -> Tensor | None:
        return self.take(name) if name in self._files else None

    def refuse_unread(self) -> None:
        unread = [name for name in self._files if not name.endswith("rotary_emb.inv_freq")]
        if unread:
            raise UnsupportedModel(f"unknown tensors, for example {unread[0]}")


class _Loader:
    """Transforms the stored tensors of one checkpoint."""

    def __init__(self, config: ModelConfig, tensors: StoredTensors, dtype: torch.dtype, device: str) -> None:
        self._config = config
        self._tensors = tensors
        self._dtype = dtype
        self._device = device

    def load(self) -> Weights:
        config, tensors = self._config, self._tensors
        # A checkpoint of the base model alone may omit the prefix.
        prefix = "model." if "model.embed_tokens.weight" in tensors or Task.EMBED not in config.tasks else ""
        final_norm = self._norm(f"{prefix}norm.weight", config.hidden**0.5)
        stored = tensors.take(f"{prefix}embed_tokens.weight")
        head = tensors.take_if_present("lm_head.weight")
        logits = None
        if Task.GENERATE in config.tasks:
            logits = self._matrix([stored if head is None else head], final_norm)
        del head
        embedding = stored.to(self._device, self._dtype, copy=True)
        del stored
        score = None if Task.EMBED in config.tasks else self._float32(tensors.take("score.weight")).t().contiguous()
        layers = tuple(self._layer(f"{prefix}layers.{index}.") for index in range(config.layers))
        tensors.refuse_unread()
        return Weights(embedding=embedding, layers=layers, final_norm=final_norm, head=logits, score=score)

    def _layer(self, prefix: str) -> LayerWeights:
        config, take = self._config, self._tensors.take
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        input_norm = self._norm(prefix + "input_layernorm.weight", config.hidden**0.5)
        post_norm = self._norm(prefix + "post_attention_layernorm.weight", config.hidden**0.5)
        qk_norm = self._qk_norm(attention)
        scale = config.query_scale if qk_norm is None else 1.0
        q, k = (_paired(take(f"{attention}{name}_proj.weight"), config.head_dim) for name in "qk")
        q = self._float32(q) * scale
        return LayerWeights(
            qkv=self._matrix([q, k, take(attention + "v_proj.weight")], input_norm),
            qkv_bias=self._qkv_bias(attention, scale),
            qk_norm=qk_norm,
            out=self._matrix([take(attention + "o_proj.weight")]),
            out_bias=self._bias(attention + "o_proj.bias"),
            gate_up=self._matrix([take(mlp + "gate_proj.weight"), take(mlp + "up_proj.weight")], post_norm),
            down=self._matrix([take(mlp + "down_proj.weight")]),
        )

    def _matrix(self, parts: Iterable[Tensor], norm: Tensor | None = None) -> Tensor:
        """The parts one after another as [in, out], with the norm before them multiplied in."""
        parts = list(parts)
        made = torch.empty(parts[0].shape[1], sum(map(len, parts)), dtype=self._dtype, device=self._device)
        column = 0
        for part in parts:
            for rows in part.split(_SLICE_ROWS):
                exact = self._float32(rows)
                made[:, column : column + len(rows)] = (exact if norm is None else exact * norm).t()
                column += len(rows)
        return made

    def _norm(self, name: str, scale: float) -> Tensor:
        return self._float32(self._tensors.take(name)) * scale

    def _bias(self, name: str) -> Tensor | None:
        bias = self._tensors.take_if_present(name)
        return None if bias is None else bias.to(self._device, self._dtype, copy=True)

    def _qkv_bias(self, attention: str, query_scale: float) -> Tensor | None:
        q, k, v = (self._tensors.take_if_present(f"{attention}{name}_proj.bias") for name in "qkv")
        if q is None or k is None or v is None:
            return None
        head_dim = self._config.head_dim
        parts = (self._float32(_paired(q, head_dim)) * query_scale, _paired(k, head_dim), v)
        return torch.cat([self._float32(part) for part in parts]).to(self._dtype)

    def _qk_norm(self, attention: str) -> Tensor | None:
        """The norms of all heads, with the scale of queries; float32."""
        config = self._config
        q = self._tensors.take_if_present(attention + "q_norm.weight")
        k = self._tensors.take_if_present(attention + "k_norm.weight")
        if q is None or k is None:
            return None
        q, k = (self._float32(_paired(one, config.head_dim)) for one in (q, k))
        return torch.cat([(q * config.query_scale).expand(config.heads, -1), k.expand(config.kv_heads, -1)])

    def _float32(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, torch.float32)


def _paired(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from (first halves, second halves) to the pairs that RoPE rotates."""
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
