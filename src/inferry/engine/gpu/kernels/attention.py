# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention over the paged KV cache, for single tokens and for prompt chunks.

The query heads that share a key head are rows of one tile, so that keys are read once. Tiles of single tokens are
split over the keys; the splits are combined by a second kernel. Softmax is computed in base 2.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferry.engine.gpu.tensors import LayerCache, StepTensors

DECODE_TILE = 16
"""Rows of a tile of single tokens: the smallest that tensor cores take."""


def chunk_tile(dtype: torch.dtype) -> int:
    """Rows of a tile of a prompt chunk: what the registers hold."""
    return 32 if dtype == torch.float32 else 128


class Splits(NamedTuple):
    """Scratch memory: outputs [rows, heads, splits, head dim] and log-sums [rows, heads, splits], float32."""

    outputs: Tensor
    log_sums: Tensor


class ChunkShape(NamedTuple):
    """How a tile of a prompt chunk reads its keys: `block_keys` at a time."""

    block_keys: int
    warps: int
    stages: int


class DecodeShape(NamedTuple):
    """How single tokens are split over their keys: into at most `splits` parts of at least `min_keys` keys."""

    splits: int
    min_keys: int
    block_keys: int = 64
    warps: int = 4
    stages: int = 3


@triton.jit
def _part(length, first, SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of one split of keys [first, length)."""
    return tl.maximum(MIN_KEYS, tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_N) * BLOCK_N)


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key that a query at `position` sees, rounded down to a block."""
    first = position * 0
    if WINDOW is not None:
        first = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _read(cache, slot, is_key, columns, DIM: tl.constexpr):
    """Keys or values [keys, columns] at these slots."""
    mask = is_key[:, None] & (columns < DIM)[None, :]
    return tl.load(cache + slot[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _add_keys(
    at, end, head, position, q, table, keys, values, columns, highest, total, sums, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The running maximum, total and sums with the keys from `at` on. Not `IS_MASKED`: every query sees all of them."""
    key = at + tl.arange(0, BLOCK_N)
    is_key = key < end
    block = tl.load(table + key // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
    slot = ((block * KV_HEADS + head) * BLOCK_TOKENS + key % BLOCK_TOKENS) * DIM
    k = _read(keys, slot, is_key, columns, DIM)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if IS_MASKED:
        visible = is_key[None, :] & (key[None, :] <= position)
        if WINDOW is not None:
            visible &= key[None, :] > position - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    # A row without a visible key so far has no maximum yet; 0 keeps its weights at 0 instead of NaN.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(highest - base)
    v = _read(values, slot, is_key, columns, DIM)
    sums = sums * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_highest, total * decay + tl.sum(weights, axis=1), sums


@triton.jit
def _attend(
    counts, starts, computed, table_starts, tables, tile_pieces, tile_firsts,
    qkv, keys, values, out, part_outputs, part_log_sums, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    IS_DECODE: tl.constexpr, SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    piece, head, first = tl.program_id(0), tl.program_id(1), 0
    if piece >= tl.load(counts + (1 if IS_DECODE else 2)):
        return
    queries: tl.constexpr = 1 if IS_DECODE else BLOCK_M // GROUP
    if not IS_DECODE:
        first = tl.load(tile_firsts + piece)
        piece = tl.load(tile_pieces + piece)
    start, seen = tl.load(starts + piece), tl.load(computed + piece)
    count = tl.load(starts + piece + 1) - start
    table = tables + tl.load(table_starts + piece)
    end = seen + tl.minimum(first + queries, count)
    begin = _first_key(seen + first, WINDOW, BLOCK_N)
    if SPLITS > 1:
        part = _part(end, begin, SPLITS, MIN_KEYS, BLOCK_N)
        begin += tl.program_id(2) * part
        if begin >= end:
            return
        end = tl.minimum(begin + part, end)
    places, columns = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PAD)
    query = first + places // GROUP
    query_head = head * GROUP + places % GROUP
    row = (start + query).to(tl.int64)
    is_query = (places < queries * GROUP) & (query < count)
    position = (seen + query)[:, None]
    mask = is_query[:, None] & (columns < DIM)[None, :]
    q_place = row * ((GROUP + 2) * KV_HEADS * DIM) + query_head * DIM
    q = tl.load(qkv + q_place[:, None] + columns[None, :], mask=mask, other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    masked = begin
    if not IS_DECODE and WINDOW is None:
        # The first query of the tile sees these keys, and so do the others: they need no mask.
        masked = (seen + first + 1) // BLOCK_N * BLOCK_N
        for at in range(begin, masked, BLOCK_N):
            highest, total, sums = _add_keys(
                at, end, head, position, q, table, keys, values, columns, highest, total, sums, scale,
                KV_HEADS, DIM, BLOCK_TOKENS, BLOCK_N, WINDOW, PRECISION, False,
            )  # fmt: skip
    for at in range(masked, end, BLOCK_N):
        highest, total, sums = _add_keys(
            at, end, head, position, q, table, keys, values, columns, highest, total, sums, scale,
            KV_HEADS, DIM, BLOCK_TOKENS, BLOCK_N, WINDOW, PRECISION, True,
        )  # fmt: skip
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    place = row * (KV_HEADS * GROUP) + query_head
    if SPLITS > 1:
        place = place * SPLITS + tl.program_id(2)
        tl.store(part_outputs + (place * DIM)[:, None] + columns[None, :], sums, mask=mask)
        tl.store(part_log_sums + place, highest + tl.log2(total), mask=is_query)
    else:
        tl.store(out + (place * DIM)[:, None] + columns[None, :], sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine(
    counts, computed, part_outputs, part_log_sums, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(counts + 1):
        return
    seen = tl.load(computed + row)
    begin = _first_key(seen, WINDOW, BLOCK_N)
    parts = tl.cdiv(seen + 1 - begin, _part(seen + 1, begin, SPLITS, MIN_KEYS, BLOCK_N))
    split = tl.arange(0, SPLITS)
    columns = tl.arange(0, DIM_PAD)
    place = row.to(tl.int64) * HEADS + head
    logs = tl.load(part_log_sums + place * SPLITS + split, mask=split < parts, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, axis=0))
    outputs = tl.load(
        part_outputs + ((place * SPLITS + split) * DIM)[:, None] + columns[None, :],
        mask=(split < parts)[:, None] & (columns < DIM)[None, :],
        other=0.0,
    )
    combined = tl.sum(outputs * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + place * DIM + columns, combined.to(out.dtype.element_ty), mask=columns < DIM)


def attend_decodes(
    step: StepTensors, qkv: Tensor, cache: LayerCache, out: Tensor, grid: int, splits: Splits, shape: DecodeShape,
    window: int | None = None,
) -> None:  # fmt: skip
    """Attention of the single-token pieces, which are the first rows; `grid`: at most this many."""
    _, kv_heads, block_tokens, dim = cache.keys.shape
    group = qkv.shape[1] // (kv_heads * dim) - 2
    common = {
        "DIM": dim,
        "DIM_PAD": max(16, triton.next_power_of_2(dim)),
        "BLOCK_N": shape.block_keys,
        "WINDOW": window,
        "SPLITS": shape.splits,
        "MIN_KEYS": shape.min_keys,
    }
    _attend[(grid, kv_heads, shape.splits)](
        step.counts, step.starts, step.computed, step.table_starts, step.tables, step.tile_pieces, step.tile_firsts,
        qkv, cache.keys, cache.values, out, splits.outputs, splits.log_sums, _scale(dim),
        KV_HEADS=kv_heads, GROUP=group, BLOCK_TOKENS=block_tokens,
        BLOCK_M=max(DECODE_TILE, triton.next_power_of_2(group)), IS_DECODE=True, PRECISION=_precision(qkv),
        num_warps=shape.warps, num_stages=shape.stages, **common,
    )  # fmt: skip
    if shape.splits > 1:
        _combine[(grid, kv_heads * group)](
            step.counts, step.computed, splits.outputs, splits.log_sums, out, HEADS=kv_heads * group, num_warps=2,
            **common,
        )  # fmt: skip


def chunk_shape(dtype: torch.dtype) -> ChunkShape:
    return ChunkShape(32, 4, 1) if dtype == torch.float32 else ChunkShape(64, 8, 2)


def attend_chunks(
    step: StepTensors, qkv: Tensor, cache: LayerCache, out: Tensor, grid: int, window: int | None = None,
    shape: ChunkShape | None = None,
) -> None:  # fmt: skip
    """Attention of the prompt chunks; `grid`: at most this many tiles."""
    shape = shape or chunk_shape(qkv.dtype)
    _, kv_heads, block_tokens, dim = cache.keys.shape
    group = qkv.shape[1] // (kv_heads * dim) - 2
    _attend[(grid, kv_heads)](
        step.counts, step.starts, step.computed, step.table_starts, step.tables, step.tile_pieces, step.tile_firsts,
        qkv, cache.keys, cache.values, out, None, None, _scale(dim),
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
        BLOCK_TOKENS=block_tokens, BLOCK_M=chunk_tile(qkv.dtype), BLOCK_N=shape.block_keys, WINDOW=window,
        IS_DECODE=False, SPLITS=1, MIN_KEYS=1, PRECISION=_precision(qkv),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def _scale(dim: int) -> float:
    return math.log2(math.e) / math.sqrt(dim)


def _precision(qkv: Tensor) -> str:
    return "ieee" if qkv.dtype == torch.float32 else "tf32"


def attend_reference(step: StepTensors, qkv: Tensor, cache: LayerCache, out: Tensor, window: int | None = None) -> None:
    """Attention of all pieces."""
    _, kv_heads, block_tokens, dim = cache.keys.shape
    group = qkv.shape[1] // (kv_heads * dim) - 2
    rows, piece = int(step.counts[0]), 0
    while int(step.starts[piece]) < rows:
        start, end = int(step.starts[piece]), int(step.starts[piece + 1])
        seen, at = int(step.computed[piece]), int(step.table_starts[piece])
        count = seen + end - start
        table = step.tables[at : at - (-count // block_tokens)].long()
        k, v = (
            one[table].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :count].float().repeat_interleave(group, 0)
            for one in cache
        )
        q = qkv[start:end, : kv_heads * group * dim].view(end - start, -1, dim).transpose(0, 1).float()
        position = torch.arange(seen, count, device=qkv.device).unsqueeze(1)
        key = torch.arange(count, device=qkv.device)
        visible = key <= position
        if window is not None:
            visible &= key > position - window
        scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~visible, float("-inf"))
        out[start:end] = (scores.softmax(-1) @ v).transpose(0, 1).reshape(end - start, -1).to(out.dtype)
        piece += 1
