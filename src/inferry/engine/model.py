"""A Llama-family decoder over a paged KV cache, written for few torch calls per layer.

What it does to weights when they are loaded, so that a step need not:
- q, k and v are one matrix, gate and up another;
- the pairs that RoPE rotates are moved next to each other, so that rotating is one complex multiplication in place
  (q and k are permuted alike, and their products do not see it);
- queries are scaled by their matrix, or by their norm where they have one;
- every norm's weights are multiplied into the matrix that follows it, and with them the root of the width, so that
  normalising is a division by the length of (hidden, root of width times epsilon).
In the cache, the keys of one head in one block are one tile, and so are its values: attention reads whole tiles.
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
    def tiles(self) -> int:
        """Tiles of one block in one layer: the keys of each head, then the values of each."""
        return 2 * self.kv_heads


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
class FewDecodes:
    """The first `rows` rows are one token each of a few sequences, read side by side at the length of the longest.

    `mask` is 0 where a key may be seen and -inf in what pads a sequence.
    """

    rows: int
    tile_index: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ManyDecodes:
    """The first `rows` rows are one token each of many sequences, whose blocks are read one by one in any order.

    `block_index` says which blocks, or is None for the first blocks of the cache, which needs no copy of them.
    `owner` is the row that each block belongs to; `mask` is -inf where a block has nothing for it, which may be
    everywhere. `blocks_of_row` lists the places of each row's own blocks, the last one repeated to a common length.
    """

    rows: int
    block_index: Tensor | None
    owner: Tensor
    mask: Tensor
    blocks_of_row: Tensor


@dataclass(frozen=True)
class PromptChunk:
    """Rows [start, end) are consecutive tokens of one sequence; `keys` tokens are visible to the last of them.

    A chunk that begins its sequence sees only itself and needs neither tiles nor mask.
    """

    start: int
    end: int
    keys: int
    tile_index: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class StepBatch:
    """All tokens of one step in one row each. Made once per step, used by every layer.

    `slots` are the cache rows of every token's keys by head, then of its values: one per tile of its block.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: FewDecodes | ManyDecodes | None
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
        self._cache = [torch.zeros(blocks, config.tiles, block_tokens, config.head_dim) for _ in range(config.layers)]
        self._tiles = [layer.view(-1, block_tokens, config.head_dim) for layer in self._cache]
        self._rows = [layer.view(-1, config.head_dim) for layer in self._cache]
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
            self._rows[index].index_copy_(0, batch.slots, qkv[:, self._q_width :].reshape(-1, config.head_dim))
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
        pieces = [self._attend_chunk(index, qkv, chunk) for chunk in batch.chunks]
        match batch.decodes:
            case FewDecodes() as few:
                pieces.insert(0, self._attend_few(index, qkv, few))
            case ManyDecodes() as many:
                pieces.insert(0, self._attend_many(index, qkv, many))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _attend_few(self, index: int, qkv: Tensor, few: FewDecodes) -> Tensor:
        config = self.config
        query = qkv[: few.rows, : self._q_width].view(few.rows, config.kv_heads, self._group, config.head_dim)
        # The query heads that share a key head stand in the place of query positions: keys need no repeating.
        keys, values = self._gather(index, few.tile_index, few.rows)
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=few.mask, scale=1.0)
        return seen.reshape(few.rows, self._q_width)

    def _attend_many(self, index: int, qkv: Tensor, many: ManyDecodes) -> Tensor:
        """Attention block by block instead of row by row: queries are brought to the blocks, which are large, and
        what each block contributes is brought back and summed. Softmax is exact: all blocks of a row share its maximum.
        """
        config, owner, rows = self.config, many.owner, many.rows
        heads, group, width = config.kv_heads, self._group, config.head_dim
        blocks = owner.shape[0]
        cache = self._cache[index]
        read = cache[:blocks] if many.block_index is None else cache.index_select(0, many.block_index)
        query = qkv[:, : self._q_width].index_select(0, owner).view(blocks, heads, group, width)
        scores = torch.empty(heads, blocks, group, self._block_tokens)
        for head in range(heads):
            torch.bmm(query[:, head], read[:, head].transpose(1, 2), out=scores[head])
        scores.add_(many.mask)
        highest = scores.amax(3).index_select(1, many.blocks_of_row).view(heads, rows, -1, group).amax(2)
        weights = scores.sub_(highest.index_select(1, owner).unsqueeze(3)).exp_()
        contributed = torch.empty(heads, blocks, group, width)
        for head in range(heads):
            torch.bmm(weights[head], read[:, heads + head], out=contributed[head])
        total = torch.zeros(heads, rows, group).index_add_(1, owner, weights.sum(3))
        seen = torch.zeros(heads, rows, group, width).index_add_(1, owner, contributed)
        return seen.div_(total.unsqueeze(3)).transpose(0, 1).reshape(rows, self._q_width)

    def _attend_chunk(self, index: int, qkv: Tensor, chunk: PromptChunk) -> Tensor:
        config = self.config
        rows = chunk.end - chunk.start
        own_rows = qkv[chunk.start : chunk.end]
        query = (
            own_rows[:, : self._q_width].view(rows, config.kv_heads, self._group, config.head_dim).permute(1, 2, 0, 3)
        )
        if chunk.tile_index is None:
            fresh = own_rows[:, self._q_width :].view(1, rows, 2, config.kv_heads, config.head_dim)
            keys, values = fresh.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            keys, values = self._gather(index, chunk.tile_index, 1)
        shape = (config.kv_heads, self._group, chunk.keys, config.head_dim)
        keys = keys[0, :, : chunk.keys].unsqueeze(1).expand(shape)
        values = values[0, :, : chunk.keys].unsqueeze(1).expand(shape)
        seen = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=1.0
        )
        return seen.permute(2, 0, 1, 3).reshape(rows, self._q_width)

    def _gather(self, index: int, tile_index: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, kv heads, keys, head dim] as views of one copy out of the cache."""
        heads = self.config.kv_heads
        read = self._tiles[index].index_select(0, tile_index).view(sequences, 2 * heads, -1, self.config.head_dim)
        return read[:, :heads], read[:, heads:]
