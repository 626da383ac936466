# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Embeds the token ids of a step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferry.engine.gpu.tensors import StepTensors

_BLOCK = 1024


@triton.jit
def _embed(counts, codes, sampled, table, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    is_real = row < tl.load(counts)
    code = tl.load(codes + row)
    from_host = tl.maximum(code, 0).to(tl.int64)
    from_device = tl.load(sampled + tl.maximum(-1 - code, 0))
    token = tl.where(is_real, tl.where(code < 0, from_device, from_host), 0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    values = tl.load(table + token * WIDTH + columns, mask=is_column & is_real, other=0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, values, mask=is_column)


def embed(step: StepTensors, sampled: Tensor, table: Tensor, out: Tensor) -> None:
    """Write the embedding of each row to `out`; zeros to rows beyond the step's. `sampled`: int64, the last tokens."""
    rows, width = out.shape
    _embed[(rows, triton.cdiv(width, _BLOCK))](step.counts, step.codes, sampled, table, out, WIDTH=width, BLOCK=_BLOCK)


def embed_reference(step: StepTensors, sampled: Tensor, table: Tensor, out: Tensor) -> None:
    count = int(step.counts[0])
    codes = step.codes[:count].long()
    tokens = torch.where(codes < 0, sampled[(-1 - codes).clamp_min(0)], codes)
    out.zero_()
    out[:count] = table[tokens]
