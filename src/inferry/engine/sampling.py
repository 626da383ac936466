"""Samples the next token of every sequence in one call.

The random number of a sequence depends only on its seed and the token's position, so that its output depends neither
on other sequences of the batch nor on preemptions.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import numpy as np
import torch
from torch import Tensor

from inferry.engine.sequences import Sequence

CutTail = Callable[[Tensor, Ordered[Sequence]], Tensor]

_MASK = (1 << 64) - 1
# Rows are drawn in groups of up to this many logits: each needs several copies in float64.
MAX_DRAWN_LOGITS = 1 << 19
DRAWN_LOGIT_BYTES = 58


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a seed and a position, by mixing the bits of both (splitmix64)."""
    mixed = _mix(_mix(seed & _MASK) ^ (position & _MASK))
    return (mixed >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@torch.inference_mode()
def sample(logits: Tensor, sequences: Ordered[Sequence]) -> list[int]:
    """One token per row. Temperature 0 is greedy; top-k and top-p are applied before sampling."""
    constrained = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
    if constrained:
        _mask(logits, constrained, [sequences[row] for row in constrained])
    # numpy's argmax is many times as fast as torch's on the CPU.
    best: list[int] = logits.numpy().argmax(axis=-1).tolist()
    drawn = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    at_once = max(1, MAX_DRAWN_LOGITS // logits.shape[-1])
    for start in range(0, len(drawn), at_once):
        rows = drawn[start : start + at_once]
        chosen = draw(logits if len(rows) == len(best) else logits[rows], [sequences[row] for row in rows])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            best[row] = token
    return best


@torch.inference_mode()
def draw(logits: Tensor, sequences: Ordered[Sequence], cut_tail: CutTail | None = None) -> Tensor:
    """One random token per row, on the device of the logits. `cut_tail` applies top-k and top-p to weights."""
    # float64: a float32 sum over a large vocabulary would lose the tail of the distribution.
    temperatures = _column([sequence.sampling.temperature for sequence in sequences], logits)
    weights = torch.softmax(logits.double().div_(temperatures), dim=-1)
    cut = [row for row, sequence in enumerate(sequences) if _needs_truncation(sequence, logits.shape[-1])]
    if cut:
        weights[cut] = (cut_tail or _cut_tail)(weights[cut], [sequences[row] for row in cut])
    # In vocabulary order, not by weight: near-ties that swap places must not shift the intervals of other tokens.
    reached = weights.cumsum(dim=-1)
    numbers = _column([uniform(sequence.seed, len(sequence.tokens)) for sequence in sequences], logits)
    tokens = torch.searchsorted(reached, numbers * reached[:, -1:], right=True)
    # Rounding may carry the number past the last weight: take the last token with a weight then.
    last = (weights > 0).double().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(tokens, last).squeeze(1)


def fill_masks(masks: Tensor, sequences: Ordered[Sequence]) -> None:
    """Write which tokens the grammars of the sequences allow: one bit per token, in a row of 32-bit words for each.

    `masks` is memory of the host.
    """
    size = masks.shape[1] * masks.element_size()
    for row, sequence in enumerate(sequences):
        assert sequence.matcher is not None
        sequence.matcher.fill(masks.data_ptr() + row * size, size)


def mask_words(vocabulary: int) -> int:
    """32-bit words of a mask."""
    return -(-vocabulary // 32)


def _mask(logits: Tensor, rows: list[int], sequences: Ordered[Sequence]) -> None:
    """Exclude the tokens that grammars do not allow. Other rows are not touched."""
    masks = torch.zeros(len(rows), mask_words(logits.shape[-1]), dtype=torch.int32)
    fill_masks(masks, sequences)
    allowed = torch.from_numpy(np.unpackbits(masks.view(torch.uint8).numpy(), axis=1, bitorder="little")).bool()
    for row, mask in zip(rows, allowed[:, : logits.shape[-1]], strict=True):
        logits[row].masked_fill_(~mask, float("-inf"))


def _column(values: list[float], beside: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1).to(beside.device, non_blocking=True)


def _needs_truncation(sequence: Sequence, vocabulary: int) -> bool:
    sampling = sequence.sampling
    return sampling.top_p < 1 or (sampling.top_k is not None and 0 < sampling.top_k < vocabulary)


def _cut_tail(weights: Tensor, sequences: Ordered[Sequence]) -> Tensor:
    """Zero all but the `top_k` most likely tokens, and of these all beyond the cumulative probability `top_p`."""
    ordered, tokens = weights.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(weights.shape[-1], device=weights.device).unsqueeze(0)
    vocabulary = weights.shape[-1]
    kept_mask = _column([min(sequence.sampling.top_k or vocabulary, vocabulary) for sequence in sequences], weights)
    ordered = ordered * (places < kept_mask)
    before = ordered.cumsum(dim=-1) - ordered
    top_p_limit = _column([sequence.sampling.top_p for sequence in sequences], weights)
    # The most likely token always stays.
    ordered = ordered * ((before < top_p_limit * ordered.sum(dim=-1, keepdim=True)) | (places == 0))
    return torch.zeros_like(weights).scatter_(1, tokens, ordered)
