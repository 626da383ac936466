"""A Llama-family decoder over a paged KV cache, with few torch calls per layer.

Weights are transformed once at load time, to save work per step: - q, k and v are one matrix, gate and up another; -
the pairs that RoPE rotates are adjacent, so that rotation is one complex multiplication in place (q and k are permuted
alike, so their products do not change); - the scale of queries is part of their matrix, or of their norm where they
have one; - the weights of every norm are multiplied into the next matrix, together with the root of the width, so that
normalising is a division by the length of (hidden, root of width times epsilon). In the cache, the keys of one head in
one block are one tile, and so are its values: attention reads whole tiles. The tiles of one head lie in the order of
their blocks, so that a sequence in neighbouring blocks is read in place.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from inferry.domain.routes import GENERATES, Task
from inferry.engine.lora import add_adapters
from inferry.engine.step_batch import FewDecodes, ManyDecodes, PaddedPrompts, PromptChunk, StepBatch, Tiles


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions of a decoder. `rope_inverse_frequencies` include scaling; rotated queries and keys are multiplied
    by `rope_factor`.

    `pooling`: which hidden states a result is made of. `labels`: those of a classification head, which exclude each
    other unless it `is_multi_label`. `has_dimensions`: the first values of a vector are a vector of their own
    (Matryoshka). A token of a layer in `sliding_layers` sees itself and the `window` - 1 tokens before it.
    `dtype` is the checkpoint's own, as its config names it.
    """

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
    tasks: frozenset[Task] = GENERATES
    pooling: Literal["mean", "last"] = "mean"
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    has_dimensions: bool = False
    rope_factor: float = 1.0
    window: int | None = None
    sliding_layers: frozenset[int] = frozenset()
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_qk_norm: bool = False
    is_tied: bool = False
    dtype: str = "float32"

    @property
    def query_scale(self) -> float:
        """What the loader multiplies queries by. It includes the rope factor of queries and of keys."""
        return float(self.head_dim**-0.5 * self.rope_factor**2)

    @property
    def tiles(self) -> int:
        """Tiles of one block in one layer: the keys of each head, then the values of each head."""
        return 2 * self.kv_heads


def probabilities(config: ModelConfig, logits: Tensor) -> Tensor:
    """Of the labels of a classification head: a softmax where they exclude each other, else each on its own."""
    is_exclusive = len(config.labels) > 1 and not config.is_multi_label
    return torch.softmax(logits, dim=1) if is_exclusive else torch.sigmoid(logits)


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Every matrix is [in, out]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """`head`: logits of tokens; `score`: a logit of the sequence for each label. A model has one of them, or neither.

    `final_norm` is the weight of the last norm, with the root of the width. It is part of `head` already. Matrices,
    biases and `embedding` have the dtype of the model; `final_norm`, `score` and norms of heads are float32.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor | None = None
    score: Tensor | None = None


class Decoder:
    """Token ids in, logits or hidden states out. Owns the KV cache; the batch says which slots each token uses."""

    def __init__(self, config: ModelConfig, weights: Weights, *, blocks: int, block_tokens: int) -> None:
        self.config = config
        self._weights = weights
        self._block_tokens = block_tokens
        self._q_width = config.heads * config.head_dim
        self._group = config.heads // config.kv_heads
        self.dtype = weights.embedding.dtype
        self.blocks = blocks
        shape = (config.tiles, blocks, block_tokens, config.head_dim)
        # Zeroed: a masked key has weight 0, and 0 times a NaN in its value would be NaN.
        self._cache = [torch.zeros(shape, dtype=self.dtype) for _ in range(config.layers)]
        self._copied = torch.empty(0, dtype=self.dtype)  # what was read out of the cache last
        self._tiles = [layer.view(-1, block_tokens, config.head_dim) for layer in self._cache]
        self._rows = [layer.view(-1, config.head_dim) for layer in self._cache]
        self._floor = torch.tensor((config.hidden * config.norm_eps) ** 0.5)
        positions = torch.arange(config.context_tokens, dtype=torch.float32)
        angles = torch.outer(positions, config.rope_inverse_frequencies)
        self._rotations = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def forward(self, batch: StepBatch) -> Tensor:
        """Logits of the batch's last rows."""
        return self.logits(self.hidden(batch), batch.last_rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, last_rows: Tensor | None) -> Tensor:
        assert self._weights.head is not None
        if last_rows is not None:
            hidden = hidden.index_select(0, last_rows)
        return torch.mm(self._normed(hidden), self._weights.head).float()

    @torch.inference_mode()
    def last_states(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The last hidden states of these rows, after the final norm."""
        return self._normed(hidden.index_select(0, rows).float()).mul_(self._weights.final_norm)

    @torch.inference_mode()
    def scores(self, states: Tensor) -> Tensor | None:
        """The probabilities that the model's classification head gives each state; None without such a head."""
        head = self._weights.score
        return None if head is None else probabilities(self.config, torch.mm(states, head))

    @torch.inference_mode()
    def hidden(self, batch: StepBatch) -> Tensor:
        """Hidden states of all rows before the final norm. Writes the KV of all tokens to the cache."""
        config, weights = self.config, self._weights
        rows = batch.ids.shape[0]
        rotated_heads = config.heads + config.kv_heads
        rotations = self._rotations.index_select(0, batch.positions)
        hidden = F.embedding(batch.ids, weights.embedding)
        # Every layer writes its results to the same memory, so that views of it are made once.
        qkv = torch.empty(rows, (rotated_heads + config.kv_heads) * config.head_dim, dtype=self.dtype)
        qk = qkv[:, : rotated_heads * config.head_dim].view(rows, rotated_heads, config.head_dim)
        precise = qk.float()  # in float32 no copy; there are no complex numbers of bfloat16
        pairs = torch.view_as_complex(precise.view(rows, rotated_heads, -1, 2))
        fresh = qkv[:, self._q_width :]
        gate_up = torch.empty(rows, 2 * config.intermediate, dtype=self.dtype)
        gate, up = gate_up.chunk(2, 1)
        for index, layer in enumerate(weights.layers):
            normed = self._normed(hidden)
            if layer.qkv_bias is None:
                torch.mm(normed, layer.qkv, out=qkv)
            else:
                torch.addmm(layer.qkv_bias, normed, layer.qkv, out=qkv)
            add_adapters(batch.adapters, index, "qkv", normed, qkv)
            if precise is not qk:
                precise.copy_(qk)
            if layer.qk_norm is not None:
                precise.copy_(F.rms_norm(precise, (config.head_dim,), None, config.norm_eps).mul_(layer.qk_norm))
            pairs.mul_(rotations)
            if precise is not qk:
                qk.copy_(precise)
            self._rows[index].index_copy_(0, batch.slots, fresh.reshape(-1, config.head_dim))
            attended = self._attend(index, qkv, batch)
            hidden.addmm_(attended, layer.out)
            add_adapters(batch.adapters, index, "out", attended, hidden)
            if layer.out_bias is not None:
                hidden.add_(layer.out_bias)
            normed = self._normed(hidden)
            torch.mm(normed, layer.gate_up, out=gate_up)
            add_adapters(batch.adapters, index, "gate_up", normed, gate_up)
            active = F.silu(gate).mul_(up)
            hidden.addmm_(active, layer.down)
            add_adapters(batch.adapters, index, "down", active, hidden)
        return hidden

    def _normed(self, hidden: Tensor) -> Tensor:
        if hidden.dtype is torch.float32:
            # Without a dtype: with one, even this one, the length takes three times as long.
            return hidden / torch.hypot(torch.linalg.vector_norm(hidden, dim=1, keepdim=True), self._floor)
        length = torch.linalg.vector_norm(hidden, dim=1, keepdim=True, dtype=torch.float32)
        return (hidden / torch.hypot(length, self._floor)).to(hidden.dtype)

    def _attend(self, index: int, qkv: Tensor, batch: StepBatch) -> Tensor:
        pieces = [self._attend_chunk(index, qkv, chunk) for chunk in batch.chunks]
        match batch.decodes:
            case FewDecodes() as few:
                pieces.insert(0, self._attend_few(index, qkv, few))
            case ManyDecodes() as many:
                pieces.insert(0, self._attend_many(index, qkv, many))
        if batch.padded is not None:
            pieces.append(self._attend_padded(index, qkv, batch.padded))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _mask(self, index: int, mask: Tensor | None, sliding_mask: Tensor | None) -> Tensor | None:
        """The mask of this layer."""
        return mask if sliding_mask is None or index not in self.config.sliding_layers else sliding_mask

    def _attend_padded(self, index: int, qkv: Tensor, padded: PaddedPrompts) -> Tensor:
        """Causal attention of whole prompts in one call: what follows a real token is never seen by it."""
        config = self.config
        prompts, length = padded.rows.shape
        read = qkv.index_select(0, padded.rows.view(-1))
        query = read[:, : self._q_width].view(prompts, length, config.kv_heads, self._group, config.head_dim)
        query = query.permute(0, 2, 3, 1, 4).reshape(-1, self._group, length, config.head_dim)
        fresh = read[:, self._q_width :].view(prompts, length, 2, config.kv_heads, config.head_dim)
        shape = (prompts * config.kv_heads, 1, length, config.head_dim)
        keys, values = (one.reshape(shape).expand_as(query) for one in fresh.permute(2, 0, 3, 1, 4).unbind(0))
        mask = self._mask(index, None, padded.sliding_mask)
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None, scale=1.0)
        seen = seen.view(prompts, config.kv_heads, self._group, length, config.head_dim).permute(0, 3, 1, 2, 4)
        return seen.reshape(prompts * length, self._q_width).index_select(0, padded.places)

    def _attend_few(self, index: int, qkv: Tensor, few: FewDecodes) -> Tensor:
        config = self.config
        query = qkv[: few.rows, : self._q_width].view(few.rows, config.kv_heads, self._group, config.head_dim)
        mask = self._mask(index, few.mask, few.sliding_mask)
        if few.rows <= few.at_once:
            return self._attend_rows(index, query, few.tiles, few.keys, mask)
        assert isinstance(few.tiles, Tensor)
        groups = zip(
            torch.split(query, few.at_once),
            torch.split(few.tiles.view(few.rows, -1), few.at_once),
            [None] * few.rows if mask is None else torch.split(mask, few.at_once),
            strict=False,
        )
        return torch.cat(
            [self._attend_rows(index, rows, tiles.view(-1), few.keys, hides) for rows, tiles, hides in groups]
        )

    def _attend_rows(self, index: int, query: Tensor, tiles: Tiles, keys: int, mask: Tensor | None) -> Tensor:
        # Query heads that share a key head take the place of query positions, so keys are not repeated.
        read_keys, values = self._gather(index, tiles, len(query), keys)
        seen = F.scaled_dot_product_attention(query, read_keys, values, attn_mask=mask, scale=1.0)
        return seen.reshape(len(query), self._q_width)

    def _attend_many(self, index: int, qkv: Tensor, many: ManyDecodes) -> Tensor:
        """Attention by block instead of by row: queries are gathered per block, and the results are summed per row.

        Softmax is exact: all blocks of a row share its maximum. A block after all others stands for padding of rows.
        """
        config, owner, rows = self.config, many.owner, many.rows
        heads, group, width = config.kv_heads, self._group, config.head_dim
        blocks = owner.shape[0]
        cache = self._cache[index]
        read = cache[:, many.read : many.read + blocks] if isinstance(many.read, int) else self._copy(cache, many.read)
        query = qkv[:, : self._q_width].index_select(0, owner).view(blocks, heads, group, width)
        products = torch.empty(heads, blocks + 1, group, self._block_tokens, dtype=self.dtype)
        products[:, blocks] = float("-inf")
        for head in range(heads):
            torch.bmm(query[:, head], read[head].transpose(1, 2), out=products[head, :blocks])
        mask = self._mask(index, many.mask, many.sliding_mask)
        assert mask is not None
        scores = products.float()  # in float32 no copy
        scores[:, :blocks].add_(mask)
        contributed = torch.empty(heads, blocks + 1, group, width, dtype=self.dtype)
        if many.places is not None:
            by_row = scores.index_select(1, many.blocks_of_row).view(heads, rows, -1, group, self._block_tokens)
            shape = by_row.transpose(2, 3).shape
            by_row = by_row.transpose(2, 3).reshape(heads, rows, group, -1).softmax(3).view(shape).transpose(2, 3)
            weights = by_row.reshape(heads, -1, group, self._block_tokens).index_select(1, many.places)
            self._add_values(weights, read[heads:], contributed)
            contributed[:, blocks] = 0.0
            parts = contributed.index_select(1, many.blocks_of_row).view(heads, rows, -1, group, width)
            return parts.sum(2, dtype=torch.float32).transpose(0, 1).reshape(rows, self._q_width).to(self.dtype)
        highest = scores.amax(3).index_select(1, many.blocks_of_row).view(heads, rows, -1, group).amax(2)
        weights = scores[:, :blocks].sub_(highest.index_select(1, owner).unsqueeze(3)).exp_()
        self._add_values(weights, read[heads:], contributed)
        total = torch.zeros(heads, rows, group).index_add_(1, owner, weights.sum(3))
        seen = torch.zeros(heads, rows, group, width).index_add_(1, owner, contributed[:, :blocks].float())
        return seen.div_(total.unsqueeze(3)).transpose(0, 1).reshape(rows, self._q_width).to(self.dtype)

    def _add_values(self, weights: Tensor, values: Tensor, out: Tensor) -> None:
        """The values of every block, weighted, by head and block."""
        for head, one in enumerate(weights.to(self.dtype)):
            torch.bmm(one, values[head], out=out[head, : len(one)])

    def _copy(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """These blocks, in a buffer that is used again: fresh memory of this size is slower than the copy itself."""
        return torch.index_select(
            cache,
            1,
            blocks,
            out=self._buffer(cache.shape[0] * len(blocks)).view(cache.shape[0], len(blocks), *cache.shape[2:]),
        )

    def _attend_chunk(self, index: int, qkv: Tensor, chunk: PromptChunk) -> Tensor:
        config = self.config
        rows = chunk.end - chunk.start
        own_rows = qkv[chunk.start : chunk.end]
        query = (
            own_rows[:, : self._q_width].view(rows, config.kv_heads, self._group, config.head_dim).permute(1, 2, 0, 3)
        )
        if chunk.tiles is None:
            fresh = own_rows[:, self._q_width :].view(1, rows, 2, config.kv_heads, config.head_dim)
            keys, values = fresh.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            keys, values = self._gather(index, chunk.tiles, 1, chunk.keys)
        shape = (config.kv_heads, self._group, chunk.keys, config.head_dim)
        keys = keys[0, :, : chunk.keys].unsqueeze(1).expand(shape)
        values = values[0, :, : chunk.keys].unsqueeze(1).expand(shape)
        mask = self._mask(index, chunk.mask, chunk.sliding_mask)
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None, scale=1.0)
        return seen.permute(2, 0, 1, 3).reshape(rows, self._q_width)

    def _gather(self, index: int, tiles: Tiles, sequences: int, keys: int) -> tuple[Tensor, Tensor]:
        """The first `keys` keys and values, [sequences, kv heads, keys, head dim], as views of the cache or of a copy.

        A copy is overwritten by the next.
        """
        heads, width = self.config.kv_heads, self.config.head_dim
        if isinstance(tiles, range):
            read = self._cache[index][:, tiles.start : tiles.stop].flatten(1, 2).unsqueeze(0)
        else:
            read = torch.index_select(self._tiles[index], 0, tiles, out=self._buffer(len(tiles)))
            read = read.view(sequences, 2 * heads, -1, width)
        return read[:, :heads, :keys], read[:, heads:, :keys]

    def _buffer(self, tiles: int) -> Tensor:
        """Memory for this many tiles."""
        if len(self._copied) < tiles:
            self._copied = torch.empty(2 * tiles, self._block_tokens, self.config.head_dim, dtype=self.dtype)
        return self._copied[:tiles]
