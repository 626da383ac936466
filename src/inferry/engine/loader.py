"""Loads the weights of a Hugging Face model directory in the layout of `engine.model`.

Tensors are read in slices, and each slice is written to its place in the final dtype and layout, so that loading needs
little memory beside the weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from inferry.domain.routes import Task
from inferry.engine.checkpoint import UnsupportedModel, check_head, read_config, weight_files
from inferry.engine.model import LayerWeights, ModelConfig, Weights

_DTYPES = ("F32", "BF16", "F16")
# Mapped at once. A mapping costs half a millisecond, and its pages count as memory of the process.
_MAPPED_VALUES = 4 << 20
# Transformed at once, in float32. Freed values between matrices are lost to fragmentation.
_SLICE_VALUES = 64 << 10


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


@dataclass(frozen=True)
class LayerNorms:
    """Weights of the norms of a layer, with the root of the width; float32."""

    input: Tensor
    post_attention: Tensor


def load_norms(directory: Path, config: ModelConfig) -> tuple[LayerNorms, ...]:
    """The norms of every layer, which the loaded weights have multiplied into their matrices."""
    loader = _Loader(config, StoredTensors(directory), torch.float32, "cpu")
    return tuple(loader.norms(f"{loader.prefix}layers.{index}.") for index in range(config.layers))


class StoredTensors:
    """The tensors of a checkpoint by name.

    A file is mapped anew for every slice, because mapped pages that were read count as memory of the process until the
    mapping ends.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in weight_files(directory):
            with safe_open(str(path), framework="pt") as stored:
                self._files |= dict.fromkeys(stored.keys(), path)
        self._unread = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._files:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        with safe_open(str(self._files[name]), framework="pt") as stored:
            found = stored.get_slice(name)
            if found.get_dtype() not in _DTYPES:
                raise UnsupportedModel(f"tensor {name} is stored as {found.get_dtype()}")
            return tuple(found.get_shape())

    def slices(self, name: str, multiple: int = 1) -> Iterator[Tensor]:
        """Consecutive rows, a multiple of `multiple` at a time."""
        rows, *columns = self.shape(name)
        self._unread.discard(name)
        mapped, sliced = (
            max(1, values // (multiple * math.prod(columns))) * multiple for values in (_MAPPED_VALUES, _SLICE_VALUES)
        )
        for start in range(0, rows, mapped):
            with safe_open(str(self._files[name]), framework="pt") as stored:
                yield from stored.get_slice(name)[start : start + mapped].split(sliced)

    def refuse_unread(self) -> None:
        unread = sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))
        if unread:
            raise UnsupportedModel(f"unknown tensors, for example {unread[0]}")


@dataclass(frozen=True)
class _Part:
    """Rows of a matrix. The pairs that RoPE rotates become adjacent where `is_rotated`."""

    name: str
    is_rotated: bool = False
    scale: float = 1.0


class _Loader:
    """Transforms the stored tensors of one checkpoint."""

    def __init__(self, config: ModelConfig, tensors: StoredTensors, dtype: torch.dtype, device: str) -> None:
        self._config = config
        self._tensors = tensors
        self._dtype = dtype
        self._device = device
        # A checkpoint of the base model alone may omit the prefix.
        has_prefix = "model.embed_tokens.weight" in tensors or Task.EMBED not in config.tasks
        self.prefix = "model." if has_prefix else ""

    def load(self) -> Weights:
        config, tensors, prefix = self._config, self._tensors, self.prefix
        table = f"{prefix}embed_tokens.weight"
        final_norm = self._norm(f"{prefix}norm.weight")
        head = score = None
        if Task.GENERATE in config.tasks:
            name = "lm_head.weight" if "lm_head.weight" in tensors else table
            head = self._matrix(_Part(name), norm=final_norm)
        elif Task.EMBED not in config.tasks:
            score = self._vector(_Part("score.weight")).t().contiguous()
            check_head(config, score.shape[1])
        embedding = self._stacked(_Part(table), self._dtype)
        layers = tuple(self._layer(f"{prefix}layers.{index}.") for index in range(config.layers))
        tensors.refuse_unread()
        return Weights(embedding=embedding, layers=layers, final_norm=final_norm, head=head, score=score)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qk_norm = self._qk_norm(attention)
        scale = config.query_scale if qk_norm is None else 1.0
        norms = self.norms(prefix)
        return LayerWeights(
            qkv=self._matrix(*self._qkv(attention, "weight", scale), norm=norms.input),
            qkv_bias=self._biases(*self._qkv(attention, "bias", scale)),
            qk_norm=qk_norm,
            out=self._matrix(_Part(attention + "o_proj.weight")),
            out_bias=self._biases(_Part(attention + "o_proj.bias")),
            gate_up=self._matrix(
                _Part(mlp + "gate_proj.weight"), _Part(mlp + "up_proj.weight"), norm=norms.post_attention
            ),
            down=self._matrix(_Part(mlp + "down_proj.weight")),
        )

    def norms(self, prefix: str) -> LayerNorms:
        return LayerNorms(*(self._norm(f"{prefix}{name}_layernorm.weight") for name in ("input", "post_attention")))

    def _qkv(self, attention: str, kind: str, query_scale: float) -> tuple[_Part, ...]:
        return (
            _Part(f"{attention}q_proj.{kind}", True, query_scale),
            _Part(f"{attention}k_proj.{kind}", True),
            _Part(f"{attention}v_proj.{kind}"),
        )

    def _qk_norm(self, attention: str) -> Tensor | None:
        """The norms of all heads, with the scale of queries; float32."""
        config = self._config
        names = attention + "q_norm.weight", attention + "k_norm.weight"
        if not all(name in self._tensors for name in names):
            return None
        q, k = self._vector(_Part(names[0], True, config.query_scale)), self._vector(_Part(names[1], True))
        return torch.cat([q.expand(config.heads, -1), k.expand(config.kv_heads, -1)])

    def _norm(self, name: str) -> Tensor:
        return self._vector(_Part(name, scale=self._config.hidden**0.5))

    def _biases(self, *parts: _Part) -> Tensor | None:
        if not all(part.name in self._tensors for part in parts):
            return None
        return torch.cat([self._vector(part) for part in parts]).to(self._dtype)

    def _matrix(self, *parts: _Part, norm: Tensor | None = None) -> Tensor:
        """The parts one after another as [in, out], with the norm before them multiplied in."""
        shapes = [self._tensors.shape(part.name) for part in parts]
        outputs = sum(rows for rows, _ in shapes)
        made = torch.empty(shapes[0][1], outputs, dtype=self._dtype, device=self._device)
        column = 0
        for part in parts:
            for rows in self._read(part):
                made[:, column : column + len(rows)] = (rows if norm is None else rows * norm).t()
                column += len(rows)
        return made

    def _vector(self, part: _Part) -> Tensor:
        return self._stacked(part, torch.float32)

    def _stacked(self, part: _Part, dtype: torch.dtype) -> Tensor:
        """The tensor in its stored layout."""
        made = torch.empty(self._tensors.shape(part.name), dtype=dtype, device=self._device)
        at = 0
        for rows in self._read(part):
            made[at : at + len(rows)] = rows
            at += len(rows)
        return made

    def _read(self, part: _Part) -> Iterator[Tensor]:
        """Slices in float32, transformed."""
        head_dim = self._config.head_dim
        for stored in self._tensors.slices(part.name, head_dim if part.is_rotated else 1):
            rows = stored.to(self._device, torch.float32)
            rows = paired(rows, head_dim) if part.is_rotated else rows
            yield rows if part.scale == 1.0 else rows * part.scale


def paired(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from (first halves, second halves) to the pairs that RoPE rotates."""
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
