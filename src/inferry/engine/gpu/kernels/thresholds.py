# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Finds the weight from which on tokens are kept, without sorting them.

The bits of positive floats are in the order of their values, so a threshold is found by bisection of its bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _reached(start, bits, IS_COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The number or the sum of the weights that are at least the float with these bits."""
    threshold = bits.to(tl.float32, bitcast=True)
    sums = tl.zeros([BLOCK], tl.float64)
    for at in range(0, WIDTH, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        weights = tl.load(start + columns, mask=columns < WIDTH, other=-1.0)
        if IS_COUNT:
            sums += tl.where(weights >= threshold, 1.0, 0.0).to(tl.float64)
        else:
            sums += tl.where(weights >= threshold, weights, 0.0).to(tl.float64)
    return tl.sum(sums, axis=0)


@triton.jit
def _search(start, low, target, IS_COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The highest bits that reach the target; `low` does."""
    high = low * 0 + 0x3F800001  # above 1.0, the largest weight
    for _ in range(31):
        middle = low + (high - low) // 2
        is_reached = _reached(start, middle, IS_COUNT, WIDTH, BLOCK) >= target
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low


@triton.jit
def _thresholds(weights, top_k, top_p, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = weights + row.to(tl.int64) * WIDTH
    count, share = tl.load(top_k + row), tl.load(top_p + row)
    low = row * 0
    if count < WIDTH:
        low = _search(start, low, count, True, WIDTH, BLOCK)
    if share < 1.0:
        total = _reached(start, low, False, WIDTH, BLOCK)
        low = _search(start, low, share * total, False, WIDTH, BLOCK)
    tl.store(out + row, low.to(tl.float32, bitcast=True))


def thresholds(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least kept weight of each row: of the `top_k` largest, those that reach the share `top_p` of their sum.

    `weights`: float32 [rows, width], each at most 1; `top_k` and `top_p`: float64 [rows]. Equal weights are kept or
    not together.
    """
    rows, width = weights.shape
    out = torch.empty(rows, dtype=torch.float32, device=weights.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _thresholds[(rows,)](weights, top_k, top_p, out, WIDTH=width, BLOCK=block, num_warps=8)
    return torch.minimum(out, weights.amax(dim=-1))  # the largest stays also where `top_p` is 0


def thresholds_reference(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered = weights.double().sort(dim=-1, descending=True).values
    kept = ordered * (torch.arange(weights.shape[1], device=weights.device) < top_k.unsqueeze(1))
    before = kept.cumsum(dim=-1) - kept
    is_kept = (kept > 0) & ((before < top_p.unsqueeze(1) * kept.sum(dim=-1, keepdim=True)) | (before == 0))
    return torch.where(is_kept, kept, 2.0).min(dim=-1).values.float()
