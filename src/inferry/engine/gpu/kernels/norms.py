# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""RMS norm of the residual stream, after the output of a block was added to it."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(
    added, residual, weight, out, index, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_INDEX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_INDEX:
        source = tl.load(index + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    dtype = residual.dtype.element_ty
    values = tl.load(residual + source * WIDTH + columns, mask=mask, other=0.0)
    if HAS_ADDED:
        other = tl.load(added + source * WIDTH + columns, mask=mask, other=0.0)
        values = (values.to(tl.float32) + other.to(tl.float32)).to(dtype)
        if not HAS_INDEX:
            tl.store(residual + row * WIDTH + columns, values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + epsilon)
    normed = (wide * scale).to(dtype).to(tl.float32)
    by = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (normed * by).to(dtype), mask=mask)


def add_norm(
    added: Tensor | None, residual: Tensor, weight: Tensor, epsilon: float, out: Tensor, index: Tensor | None = None
) -> None:
    """Add `added` to `residual` in place and write the norm of the sum to `out`.

    With `index`, `out` has the norms of these rows and `residual` stays as it is.
    """
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        added,
        residual,
        weight,
        out,
        index,
        epsilon,
        WIDTH=width,
        BLOCK=block,
        HAS_ADDED=added is not None,
        HAS_INDEX=index is not None,
        num_warps=min(16, max(4, block // 512)),
    )


def add_norm_reference(
    added: Tensor | None, residual: Tensor, weight: Tensor, epsilon: float, out: Tensor, index: Tensor | None = None
) -> None:
    rows = out.shape[0]
    source = torch.arange(rows) if index is None else index[:rows].long()
    source = source.to(residual.device)
    values = residual[source]
    if added is not None:
        values = values + added[source]
        if index is None:
            residual[:rows] = values
    wide = values.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    out.copy_(weight * normed.to(values.dtype))
