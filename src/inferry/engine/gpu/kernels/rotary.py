# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Rotates queries and keys, after their norm where the model has one, and writes keys and values to the KV cache."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferry.engine.gpu.tensors import LayerCache, StepTensors


class Rotary(NamedTuple):
    """Cosines and sines [positions, head dim / 2] in the model's precision."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """Weights of the norms of queries and keys, each [head dim]."""

    query: Tensor
    key: Tensor
    epsilon: float


@triton.jit
def _normed(low, high, weight, columns, is_column, epsilon, dtype: tl.constexpr, DIM: tl.constexpr):
    """RMS norm over the last axis of heads given as halves."""
    mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / DIM
    scale = tl.rsqrt(mean + epsilon)[:, None]
    by_low = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    by_high = tl.load(weight + DIM // 2 + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    low = ((low * scale).to(dtype).to(tl.float32) * by_low).to(dtype).to(tl.float32)
    high = ((high * scale).to(dtype).to(tl.float32) * by_high).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def _rotated(low, high, cos, sin, dtype: tl.constexpr):
    """Each product and the sum are rounded to `dtype`."""
    new_low = (low * cos).to(dtype).to(tl.float32) + (-high * sin).to(dtype).to(tl.float32)
    new_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return new_low.to(dtype), new_high.to(dtype)


@triton.jit
def _rotate_store(
    counts, computed, starts, row_pieces, table_starts, tables,
    qkv, cos_table, sin_table, keys, values, query_norm, key_norm, epsilon,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    GROUP_PAD: tl.constexpr, HALF_PAD: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(counts):
        return
    dtype = qkv.dtype.element_ty
    half: tl.constexpr = DIM // 2
    piece = tl.load(row_pieces + row)
    position = tl.load(computed + piece) + row - tl.load(starts + piece)
    block = tl.load(tables + tl.load(table_starts + piece) + position // BLOCK_TOKENS).to(tl.int64)
    slot = ((block * KV_HEADS + head) * BLOCK_TOKENS + position % BLOCK_TOKENS) * DIM
    columns = tl.arange(0, HALF_PAD)
    is_column = columns < half
    cos = tl.load(cos_table + position * half + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_table + position * half + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    start = qkv + row.to(tl.int64) * ((GROUP + 2) * KV_HEADS * DIM)

    group = tl.arange(0, GROUP_PAD)
    place = (head * GROUP + group)[:, None] * DIM + columns[None, :]
    mask = (group < GROUP)[:, None] & is_column[None, :]
    low = tl.load(start + place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(start + place + half, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        low, high = _normed(low, high, query_norm, columns, is_column, epsilon, dtype, DIM)
    low, high = _rotated(low, high, cos, sin, dtype)
    tl.store(start + place, low, mask=mask)
    tl.store(start + place + half, high, mask=mask)

    place = (GROUP * KV_HEADS + head) * DIM + columns[None, :]
    mask = is_column[None, :]
    low = tl.load(start + place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(start + place + half, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        low, high = _normed(low, high, key_norm, columns, is_column, epsilon, dtype, DIM)
    low, high = _rotated(low, high, cos, sin, dtype)
    tl.store(keys + slot + columns[None, :], low, mask=mask)
    tl.store(keys + slot + half + columns[None, :], high, mask=mask)

    place += KV_HEADS * DIM
    tl.store(values + slot + columns[None, :], tl.load(start + place, mask=mask), mask=mask)
    tl.store(values + slot + half + columns[None, :], tl.load(start + place + half, mask=mask), mask=mask)


def rotate_store(
    step: StepTensors, qkv: Tensor, rotary: Rotary, cache: LayerCache, norms: HeadNorms | None = None
) -> None:
    """Rotate the queries of `qkv` in place and write its rotated keys and its values to the cache."""
    _, kv_heads, block_tokens, dim = cache.keys.shape
    group = qkv.shape[1] // (kv_heads * dim) - 2
    _rotate_store[(qkv.shape[0], kv_heads)](
        step.counts,
        step.computed,
        step.starts,
        step.row_pieces,
        step.table_starts,
        step.tables,
        qkv,
        rotary.cos,
        rotary.sin,
        cache.keys,
        cache.values,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK_TOKENS=block_tokens,
        GROUP_PAD=triton.next_power_of_2(group),
        HALF_PAD=triton.next_power_of_2(dim // 2),
        HAS_NORM=norms is not None,
        num_warps=2,
    )


def rotate_store_reference(
    step: StepTensors, qkv: Tensor, rotary: Rotary, cache: LayerCache, norms: HeadNorms | None = None
) -> None:
    _, kv_heads, block_tokens, dim = cache.keys.shape
    rows = int(step.counts[0])
    heads = qkv[:rows].view(rows, -1, dim)
    first_key = heads.shape[1] - 2 * kv_heads
    piece = step.row_pieces[:rows].long()
    position = step.computed[piece].long() + torch.arange(rows, device=qkv.device) - step.starts[piece].long()
    block = step.tables[step.table_starts[piece].long() + position // block_tokens].long()
    rotated = heads[:, : first_key + kv_heads]
    if norms is not None:
        weight = torch.stack([norms.query] * first_key + [norms.key] * kv_heads)
        wide = rotated.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norms.epsilon)
        rotated = weight * wide.to(qkv.dtype)
    cos, sin = (table[position].repeat(1, 2).unsqueeze(1) for table in rotary)
    low, high = rotated.chunk(2, -1)
    rotated = rotated * cos + torch.cat([-high, low], -1) * sin
    cache.keys[block, :, position % block_tokens] = rotated[:, first_key:]
    cache.values[block, :, position % block_tokens] = heads[:, first_key + kv_heads :]
    heads[:, :first_key] = rotated[:, :first_key]
