"""A Llama-family decoder over a paged KV cache, written for few torch calls per layer.

What it does to weights when they are loaded, so that a step need not:
- q, k and v are one matrix, gate and up another;
- the pairs that RoPE rotates are moved next to each other, so that rotating is one complex multiplication in place
  (q and k are permuted alike, and their products do not see it);
- every norm's weights are multiplied into the matrix that follows it, and with them the root of the width, so that
  normalising is a division by the length of (hidden, root of width times epsilon).
K and V of a token lie side by side in the cache, so that writing is one copy and reading one gather.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `rope_inverse_frequencies` already has any scaling in it."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    context_tokens: int
    rope_inverse_frequencies: Tensor
    eos_ids: frozenset[int]

    @property
    def kv_width(self) -> int:
        """Numbers that one token keeps in one layer: its keys, then its values."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LayerWeights:
    """One layer, ready to multiply from the right: every matrix is [in, out]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    head: Tensor


@dataclass(frozen=True)
class DecodeGroup:
    """Rows [start, end) hold one token each of sequences of similar length, `blocks` of them read per sequence.

    `mask` is 0 where a key may be seen and -inf in what pads a sequence to the group's length.
    """

    start: int
    end: int
    block_index: Tensor
    keys: int
    mask: Tensor


@dataclass(frozen=True)
class PromptChunk:
    """Rows [start, end) are consecutive tokens of one sequence; `keys` tokens are visible to the last of them.

    A chunk that begins its sequence sees only itself and needs neither blocks nor mask.
    """

    start: int
    end: int
    keys: int
    block_index: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class StepBatch:
    """All tokens of one step in one row each. Made once per step, used by every layer."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: Ordered[DecodeGroup]
    chunks: Ordered[PromptChunk]
    last_rows: Tensor | None


class Decoder:
    """Token ids in, logits out; the KV cache is its own and the batch says which slots are whose."""

    def __init__(self, config: ModelConfig, weights: Weights, *, blocks: int, block_tokens: int) -> None:
        self.config = config
        self._weights = weights
        self._block_tokens = block_tokens
        self._q_width = config.heads * config.head_dim
        self._group = config.heads // config.kv_heads
        # Zeros, not garbage: a masked key has weight 0, and 0 times a NaN in its value would still be NaN.
        self._cache = [torch.zeros(blocks, block_tokens, config.kv_width) for _ in range(config.layers)]
        self._by_slot = [layer.view(-1, config.kv_width) for layer in self._cache]
        self._floor = torch.tensor((config.hidden * config.norm_eps) ** 0.5)
        positions = torch.arange(config.context_tokens, dtype=torch.float32)
        angles = torch.outer(positions, config.rope_inverse_frequencies)
        self._rotations = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits of the batch's last rows; the KV of all its tokens is in the cache afterwards."""
        config, weights = self.config, self._weights
        rows = batch.ids.shape[0]
        rotated_heads = config.heads + config.kv_heads
        rotations = self._rotations.index_select(0, batch.positions)
        hidden = F.embedding(batch.ids, weights.embedding)
        for index, layer in enumerate(weights.layers):
            normed = self._normed(hidden)
            if layer.qkv_bias is None:
                qkv = torch.mm(normed, layer.qkv)
            else:
                qkv = torch.addmm(layer.qkv_bias, normed, layer.qkv)
            qk = qkv[:, : rotated_heads * config.head_dim].view(rows, rotated_heads, config.head_dim)
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (config.head_dim,), None, config.norm_eps).mul_(layer.qk_norm))
            torch.view_as_complex(qk.view(rows, rotated_heads, -1, 2)).mul_(rotations)
            self._by_slot[index].index_copy_(0, batch.slots, qkv[:, self._q_width :])
            attended = self._attend(index, qkv, batch)
            hidden.addmm_(attended, layer.out)
            if layer.out_bias is not None:
                hidden.add_(layer.out_bias)
            normed = self._normed(hidden)
            gate, up = torch.mm(normed, layer.gate_up).chunk(2, 1)
            hidden.addmm_(F.silu(gate).mul_(up), layer.down)
        if batch.last_rows is not None:
            hidden = hidden.index_select(0, batch.last_rows)
        return torch.mm(self._normed(hidden), weights.head)

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden / torch.hypot(torch.linalg.vector_norm(hidden, dim=1, keepdim=True), self._floor)

    def _attend(self, index: int, qkv: Tensor, batch: StepBatch) -> Tensor:
        pieces = [self._attend_decodes(index, qkv, group) for group in batch.decodes]
        pieces += [self._attend_chunk(index, qkv, chunk) for chunk in batch.chunks]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _attend_decodes(self, index: int, qkv: Tensor, group: DecodeGroup) -> Tensor:
        config = self.config
        rows = group.end - group.start
        query = qkv[group.start : group.end, : self._q_width].view(rows, config.kv_heads, self._group, config.head_dim)
        # The query heads that share a key head stand in the place of query positions: keys need no repeating.
        keys, values = self._gather(index, group.block_index, rows)
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=group.mask)
        return seen.reshape(rows, self._q_width)

    def _attend_chunk(self, index: int, qkv: Tensor, chunk: PromptChunk) -> Tensor:
        config = self.config
        rows = chunk.end - chunk.start
        mine = qkv[chunk.start : chunk.end]
        query = mine[:, : self._q_width].view(rows, config.kv_heads, self._group, config.head_dim).permute(1, 2, 0, 3)
        if chunk.block_index is None:
            fresh = mine[:, self._q_width :].view(1, rows, 2, config.kv_heads, config.head_dim)
            keys, values = fresh.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            keys, values = self._gather(index, chunk.block_index, 1)
        shape = (config.kv_heads, self._group, chunk.keys, config.head_dim)
        keys = keys[0, :, : chunk.keys].unsqueeze(1).expand(shape)
        values = values[0, :, : chunk.keys].unsqueeze(1).expand(shape)
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None)
        return seen.permute(2, 0, 1, 3).reshape(rows, self._q_width)

    def _gather(self, index: int, block_index: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, kv heads, keys, head dim] as views of one copy out of the cache."""
        config = self.config
        read = self._cache[index].index_select(0, block_index)
        keys, values = read.view(sequences, -1, 2, config.kv_heads, config.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values
