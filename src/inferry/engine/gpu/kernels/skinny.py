# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Product of few rows with a large matrix, at the speed of memory: every weight is read once."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16


class SkinnyShape(NamedTuple):
    """Weights [block_out, block_in] that a program reads at a time. `has_dot`: with tensor cores."""

    block_out: int
    block_in: int
    warps: int
    stages: int
    has_dot: bool


@triton.jit
def _skinny(
    x, weight, bias, out, rows, width_in, width_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_out = outs < width_out
    ins = tl.arange(0, BLOCK_K)
    weights = weight + outs.to(tl.int64)[:, None] * width_in + ins[None, :]
    if HAS_DOT:
        places = tl.arange(0, BLOCK_M)
        inputs = x + places[None, :] * width_in + ins[:, None]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for at in range(0, width_in, BLOCK_K):
            is_in = ins < width_in - at
            w = tl.load(weights + at, mask=is_out[:, None] & is_in[None, :], other=0.0)
            v = tl.load(inputs + at, mask=is_in[:, None] & (places < rows)[None, :], other=0.0)
            sums += tl.dot(w, v, input_precision=PRECISION)
        if HAS_BIAS:
            sums += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
        place = places[None, :] * width_out + outs[:, None]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_out[:, None] & (places < rows)[None, :])
    else:
        products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for at in range(0, width_in, BLOCK_K):
            is_in = ins < width_in - at
            w = tl.load(weights + at, mask=is_out[:, None] & is_in[None, :], other=0.0).to(tl.float32)
            v = tl.load(x + ins + at, mask=is_in, other=0.0).to(tl.float32)
            products += w * v[None, :]
        total = tl.sum(products, axis=1)
        if HAS_BIAS:
            total += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)
        tl.store(out + outs, total.to(out.dtype.element_ty), mask=is_out)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, shape: SkinnyShape) -> None:
    """out = x · weightᵀ + bias for at most `MAX_ROWS` rows; one row where `shape` has no dot."""
    rows, width_in = x.shape
    width_out = weight.shape[0]
    _skinny[(triton.cdiv(width_out, shape.block_out),)](
        x, weight, bias, out, rows, width_in, width_out,
        BLOCK_M=MAX_ROWS, BLOCK_N=shape.block_out, BLOCK_K=shape.block_in, HAS_BIAS=bias is not None,
        HAS_DOT=shape.has_dot, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    wide = x.float() @ weight.float().t()
    out.copy_(wide if bias is None else wide + bias.float())
