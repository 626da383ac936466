"""Draws tokens on the device: as `engine.sampling` does, but without sorting the vocabulary."""

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from inferry.engine.gpu.kernels.masks import mask_rows
from inferry.engine.gpu.kernels.thresholds import thresholds
from inferry.engine.sampling import draw
from inferry.engine.sequences import Sequence


def draw_on_device(logits: Tensor, sequences: Ordered[Sequence]) -> Tensor:
    """One random token per row: the CPU's, except where `top_k` or `top_p` cuts between equal weights."""
    return draw(logits, sequences, cut_tail)


@torch.inference_mode()
def choose_masked(logits: Tensor, sampled: Tensor, rows: list[int], masks: Tensor) -> None:
    """Apply masks of the host to these rows of the logits, and choose the most likely token again."""
    index = torch.tensor(rows).to(logits.device, non_blocking=True)
    mask_rows(logits, index, masks.to(logits.device, non_blocking=True))
    sampled[index] = logits[index].argmax(dim=1)


def cut_tail(weights: Tensor, sequences: Ordered[Sequence]) -> Tensor:
    """Zero the weights of all tokens that `top_k` and `top_p` exclude. Equal weights stay or go together."""
    vocabulary, narrow = weights.shape[-1], weights.float()
    limits = [(float(sequence.sampling.top_k or vocabulary), sequence.sampling.top_p) for sequence in sequences]
    top_k, top_p = torch.tensor(limits, dtype=torch.float64).t().contiguous().to(weights.device, non_blocking=True)
    return weights * (narrow >= thresholds(narrow, top_k, top_p).unsqueeze(1))
