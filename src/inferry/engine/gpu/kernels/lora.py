# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Adds what LoRA adapters make of the rows of a step to the output of a matrix, for all adapters at once.

Rows of one adapter form tiles (`gpu.adapter_tiles`). The first kernel multiplies the inputs of a tile by the narrow
matrix of its adapter, the second one the results by the wide matrix. The number of tiles is on the device, so that a
captured launch serves any mixture of adapters. The inputs are split over several programs, whose sums are added up by
the second kernel in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferry.engine.gpu.metadata import ADAPTER_TILES
from inferry.engine.gpu.tensors import StepTensors

_MAX_SPLITS = 8
_SPLIT_WIDTH = 1024


class StackedAdapters(NamedTuple):
    """One matrix of a layer for all slots: `a` [slots, parts, rank, in], `b` [slots, out, rank].

    `widths`: outputs of each part, at most three. Each part has ranks of its own.
    """

    a: Tensor
    b: Tensor
    widths: tuple[int, ...]


def splits_of(inputs: int) -> int:
    """Into how many programs a tile is split over its inputs."""
    return min(_MAX_SPLITS, -(-inputs // _SPLIT_WIDTH))


def input_block(rank: int, tile: int, dtype: torch.dtype) -> int:
    """Inputs that a program of the first kernel multiplies at once: what shared memory holds of a few stages."""
    block = min(256 if tile < 64 else 64, 16_384 // rank)
    return max(16, block // 2) if dtype == torch.float32 else max(16, block)


def output_block(rank: int, tile: int, widest: int, dtype: torch.dtype) -> int:
    """Outputs of a program of the second kernel: what registers hold. float32 is multiplied without tensor cores."""
    block = min(256 if tile < 64 and widest > 4096 else 128, 8_192 // rank)
    return max(16, block // 4) if dtype == torch.float32 else max(16, block)


@triton.jit
def _narrow(
    counts, rows, tile_slots, tile_starts, tile_counts, inputs, a, narrow,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, SHARE: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile >= tl.load(counts + COUNT):
        return
    start, slot = tl.load(tile_starts + tile), tl.load(tile_slots + tile).to(tl.int64)
    places, ranks = tl.arange(0, TILE), tl.arange(0, RANK)
    is_row = places < tl.load(tile_counts + tile)
    row = tl.load(rows + start + places, mask=is_row, other=0).to(tl.int64)
    matrix = a + (slot * PARTS + part) * RANK * WIDTH
    sums = tl.zeros([TILE, RANK], tl.float32)
    for at in range(split * SHARE, tl.minimum((split + 1) * SHARE, WIDTH), BLOCK):
        column = at + tl.arange(0, BLOCK)
        is_column = column < WIDTH
        mask = is_row[:, None] & is_column[None, :]
        values = tl.load(inputs + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
        weights = tl.load(matrix + ranks[:, None] * WIDTH + column[None, :], mask=is_column[None, :], other=0.0)
        sums += tl.dot(values, tl.trans(weights), input_precision=PRECISION)
    place = (((start + places) * PARTS + part) * SPLITS + split) * RANK
    tl.store(narrow + place[:, None] + ranks[None, :], sums, mask=is_row[:, None])


@triton.jit
def _widen(
    counts, rows, tile_slots, tile_starts, tile_counts, narrow, b, out,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    if tile >= tl.load(counts + COUNT):
        return
    # Blocks of columns lie within one part.
    first_blocks: tl.constexpr = (FIRST + BLOCK - 1) // BLOCK
    second_blocks: tl.constexpr = (SECOND + BLOCK - 1) // BLOCK
    width: tl.constexpr = FIRST + SECOND + THIRD
    is_later = (block >= first_blocks).to(tl.int32)
    is_third = (block >= first_blocks + second_blocks).to(tl.int32)
    part = is_later + is_third
    unused = is_later * (first_blocks * BLOCK - FIRST) + is_third * (second_blocks * BLOCK - SECOND)
    column = block * BLOCK - unused + tl.arange(0, BLOCK)
    is_column = column < FIRST + is_later * SECOND + is_third * THIRD
    start, slot = tl.load(tile_starts + tile), tl.load(tile_slots + tile).to(tl.int64)
    places, ranks = tl.arange(0, TILE), tl.arange(0, RANK)
    is_row = places < tl.load(tile_counts + tile)
    row = tl.load(rows + start + places, mask=is_row, other=0).to(tl.int64)
    weights = tl.load(b + (slot * width + column)[:, None] * RANK + ranks[None, :], mask=is_column[:, None], other=0.0)
    place = ((start + places) * PARTS + part) * SPLITS * RANK
    sums = tl.zeros([TILE, RANK], tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(narrow + (place + split * RANK)[:, None] + ranks[None, :], mask=is_row[:, None], other=0.0)
    dtype = out.dtype.element_ty
    added = tl.dot(sums.to(dtype), tl.trans(weights), input_precision=PRECISION).to(dtype)
    target = out + row[:, None] * width + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    before = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (before.to(tl.float32) + added.to(tl.float32)).to(dtype), mask=mask)


def add_adapters(
    step: StepTensors, inputs: Tensor, stack: StackedAdapters, narrow: Tensor, out: Tensor, grid: int, tile: int
) -> None:
    """Add to the rows of `out` what their adapters make of `inputs`; `grid`: at most this many tiles of `tile` rows.

    `narrow`: scratch memory, float32, with rows times parts times splits times rank values.
    """
    _, parts, rank, inputs_width = stack.a.shape
    splits = splits_of(inputs_width)
    block = input_block(rank, tile, inputs.dtype)
    share = triton.cdiv(triton.cdiv(inputs_width, splits), block) * block
    precision = "ieee" if inputs.dtype == torch.float32 else "tf32"
    tiles = (step.adapter_rows, step.adapter_slots, step.adapter_starts, step.adapter_counts)
    common = {
        "PARTS": parts, "RANK": rank, "TILE": tile, "SPLITS": splits, "COUNT": ADAPTER_TILES, "PRECISION": precision,
        "num_warps": 4,
    }  # fmt: skip
    _narrow[(grid, parts, splits)](
        step.counts, *tiles, inputs, stack.a, narrow, WIDTH=inputs_width, BLOCK=block, SHARE=share, num_stages=3,
        **common,
    )  # fmt: skip
    first, second, third = (*stack.widths, 0, 0)[:3]
    block = output_block(rank, tile, max(stack.widths), inputs.dtype)
    blocks = sum(triton.cdiv(width, block) for width in stack.widths)
    _widen[(grid, blocks)](
        step.counts, *tiles, narrow, stack.b, out, FIRST=first, SECOND=second, THIRD=third, BLOCK=block, **common
    )


def add_adapters_reference(step: StepTensors, inputs: Tensor, stack: StackedAdapters, out: Tensor) -> None:
    for tile in range(int(step.counts[ADAPTER_TILES])):
        start, count, slot = (int(one[tile]) for one in (step.adapter_starts, step.adapter_counts, step.adapter_slots))
        rows = step.adapter_rows[start : start + count].long()
        first = 0
        for part, width in enumerate(stack.widths):
            narrow = (inputs[rows].float() @ stack.a[slot, part].float().t()).to(out.dtype)
            wide = narrow.float() @ stack.b[slot, first : first + width].float().t()
            out[rows, first : first + width] += wide.to(out.dtype)
            first += width
