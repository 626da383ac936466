# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""SiLU of the gate times the up projection."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (active * up).to(dtype), mask=mask)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """`gate_up` has the gates of each row, then the ups."""
    rows, width = out.shape
    _silu_mul[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, WIDTH=width, BLOCK=_BLOCK, num_warps=8)


def silu_mul_reference(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.chunk(2, 1)
    out.copy_(F.silu(gate) * up)
