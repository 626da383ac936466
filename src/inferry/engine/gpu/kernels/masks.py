# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Excludes tokens from the logits of some rows, by masks of one bit per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _mask_rows(logits, rows, masks, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + which)
    words = tl.load(masks + which * WORDS + columns // 32, mask=columns < WIDTH, other=-1)
    is_excluded = ((words >> (columns % 32)) & 1) == 0
    tl.store(logits + row * WIDTH + columns, float("-inf"), mask=is_excluded & (columns < WIDTH))


def mask_rows(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the logits of these rows to minus infinity where the bit of their mask is 0. Other rows are not touched.

    `rows` are int64; `masks` has 32-bit words, one row for each.
    """
    count, width = rows.shape[0], logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(width))
    _mask_rows[(count, triton.cdiv(width, block))](
        logits, rows, masks, WIDTH=width, WORDS=masks.shape[1], BLOCK=block, num_warps=8
    )


def mask_rows_reference(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    columns = torch.arange(logits.shape[1], device=logits.device)
    bits = masks[:, columns // 32] >> (columns % 32).to(torch.int32)
    logits[rows] = logits[rows].masked_fill((bits & 1) == 0, float("-inf"))
