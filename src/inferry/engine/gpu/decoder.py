"""A decoder on the device. All memory is allocated once, so that its passes can be captured in CUDA graphs."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from inferry.engine.gpu.adapters import GpuAdapters
from inferry.engine.gpu.kernels.activation import silu_mul
from inferry.engine.gpu.kernels.attention import DecodeShape, Splits, attend_chunks, attend_decodes, chunk_tile
from inferry.engine.gpu.kernels.embedding import embed
from inferry.engine.gpu.kernels.norms import add_norm
from inferry.engine.gpu.kernels.rotary import Rotary, rotate_store
from inferry.engine.gpu.metadata import Capacity, section_lengths
from inferry.engine.gpu.tensors import LayerCache, StepTensors, step_tensors
from inferry.engine.gpu.weights import GpuWeights
from inferry.engine.model import ModelConfig

_MAX_SPLITS = 32
_PROGRAMS = 264
"""Attention of few sequences is split until there are this many programs: two for each multiprocessor."""


@dataclass(frozen=True)
class PassShape:
    """Upper limits that a pass is launched with: rows, single-token pieces, tiles of chunks, and tiles of adapters."""

    rows: int
    decodes: int
    tiles: int
    adapter_tiles: int = 0


def tile_queries(config: ModelConfig, dtype: torch.dtype) -> int:
    return chunk_tile(dtype) // (config.heads // config.kv_heads)


def decode_shape(decodes: int, kv_heads: int) -> DecodeShape:
    """Splits of a step with this many decodes: more for fewer, and always a few, for long contexts."""
    wanted = -(-_PROGRAMS // (decodes * kv_heads))
    splits = min(_MAX_SPLITS, max(4, triton.next_power_of_2(wanted)))
    min_keys = {32: 64, 16: 64, 8: 128}.get(splits, 256 if decodes <= 32 else 1024)
    return DecodeShape(splits=splits, min_keys=min_keys)


class GpuDecoder:
    """Token ids to sampled tokens. Owns the weights, the KV cache and the memory of a step.

    `body` computes all rows of a step; `tail` then the logits and the best tokens of its last rows. Both read the
    metadata in `metadata` and write to fixed addresses.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: GpuWeights,
        capacity: Capacity,
        *,
        blocks: int,
        device: torch.device,
        adapters: GpuAdapters | None = None,
    ) -> None:
        self.config = config
        self.adapters = adapters
        self.capacity = capacity
        self._weights = weights
        dtype, rows, pieces = weights.dtype, capacity.rows, capacity.pieces

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.metadata = torch.zeros(sum(section_lengths(capacity).values()), dtype=torch.int32, device=device)
        self.step: StepTensors = step_tensors(capacity, self.metadata)
        self.sampled = torch.zeros(pieces, dtype=torch.int64, device=device)
        self.logits = empty(pieces, config.vocab_size if weights.head is not None else 1)
        self._residual, self._added, self._normed = (empty(rows, config.hidden) for _ in range(3))
        self._qkv = empty(rows, (config.heads + 2 * config.kv_heads) * config.head_dim)
        self._attended = empty(rows, config.heads * config.head_dim)
        self._gate_up, self._active = empty(rows, 2 * config.intermediate), empty(rows, config.intermediate)
        # The smallest number of splits times the most pieces, or the most splits times the fewest.
        places = max(n * decode_shape(n, config.kv_heads).splits for n in range(1, pieces + 1))
        self._split_outputs = empty(places * config.heads * config.head_dim, dtype=torch.float32)
        self._split_log_sums = empty(places * config.heads, dtype=torch.float32)
        shape = (blocks, config.kv_heads, capacity.block_tokens, config.head_dim)
        # Zeroed: a masked key has weight 0, and 0 times a NaN in its value would be NaN.
        self._cache = [
            LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
            for _ in range(config.layers)
        ]
        angles = torch.outer(
            torch.arange(config.context_tokens, dtype=torch.float32), config.rope_inverse_frequencies.float().cpu()
        )
        tables = (angles.cos() * config.rope_factor, angles.sin() * config.rope_factor)
        self._rotary = Rotary(*(table.to(dtype).to(device) for table in tables))

    @torch.inference_mode()
    def body(self, shape: PassShape) -> None:
        """Compute all layers for the rows of the step; write their keys and values to the cache."""
        config, weights, step = self.config, self._weights, self.step
        residual, added, normed = (one[: shape.rows] for one in (self._residual, self._added, self._normed))
        qkv, attended = self._qkv[: shape.rows], self._attended[: shape.rows]
        gate_up, active = self._gate_up[: shape.rows], self._active[: shape.rows]
        embed(step, self.sampled, weights.embedding, residual)
        for index, layer in enumerate(weights.layers):
            add_norm(added if index else None, residual, layer.input_norm, config.norm_eps, normed)
            _linear(normed, layer.qkv, layer.qkv_bias, qkv)
            self._adapt(index, "qkv", normed, qkv, shape)
            rotate_store(step, qkv, self._rotary, self._cache[index], layer.head_norms)
            self._attend(index, qkv, attended, shape)
            _linear(attended, layer.out, layer.out_bias, added)
            self._adapt(index, "out", attended, added, shape)
            add_norm(added, residual, layer.post_norm, config.norm_eps, normed)
            _linear(normed, layer.gate_up, None, gate_up)
            self._adapt(index, "gate_up", normed, gate_up, shape)
            silu_mul(gate_up, active)
            _linear(active, layer.down, None, added)
            self._adapt(index, "down", active, added, shape)

    @torch.inference_mode()
    def tail(self, rows: int) -> None:
        """Logits and the most likely token of the first `rows` last rows."""
        assert self._weights.head is not None
        normed = self._normed[:rows]
        self._final_norm(normed, self.step.last_rows)
        logits = self.logits[:rows]
        _linear(normed, self._weights.head, None, logits)
        torch.argmax(logits, dim=1, out=self.sampled[:rows])

    @torch.inference_mode()
    def states(self, rows: Tensor) -> Tensor:
        """The last hidden states of these rows of the step, after the final norm."""
        out = self._normed.new_empty(rows.shape[0], self.config.hidden)
        self._final_norm(out, rows)
        return out

    def _final_norm(self, out: Tensor, rows: Tensor) -> None:
        add_norm(self._added, self._residual, self._weights.final_norm, self.config.norm_eps, out, rows)

    def _adapt(self, index: int, matrix: str, inputs: Tensor, out: Tensor, shape: PassShape) -> None:
        """Passes without adapters launch nothing for them."""
        if shape.adapter_tiles:
            assert self.adapters is not None
            self.adapters.add(self.step, index, matrix, inputs, out, shape.adapter_tiles, has_chunks=shape.tiles > 0)

    def _attend(self, index: int, qkv: Tensor, attended: Tensor, shape: PassShape) -> None:
        cache = self._cache[index]
        window = self.config.window if index in self.config.sliding_layers else None
        if shape.decodes:
            how = decode_shape(shape.decodes, self.config.kv_heads)
            heads, dim = self.config.heads, self.config.head_dim
            places = shape.decodes * heads * how.splits
            splits = Splits(
                self._split_outputs[: places * dim].view(shape.decodes, heads, how.splits, dim),
                self._split_log_sums[:places].view(shape.decodes, heads, how.splits),
            )
            attend_decodes(self.step, qkv, cache, attended, shape.decodes, splits, how, window)
        if shape.tiles:
            attend_chunks(self.step, qkv, cache, attended, shape.tiles, window)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)
