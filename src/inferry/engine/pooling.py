"""One result per pooled sequence: a normalised vector, or the probabilities of a classification head."""

from collections.abc import Sequence as Ordered
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inferry.engine.model import ModelConfig
from inferry.engine.planner import Work


class HiddenStates(Protocol):
    """Reads the last hidden states of a step, as float32 on the CPU."""

    config: ModelConfig

    def last_states(self, hidden: Tensor, rows: Tensor) -> Tensor: ...

    def scores(self, states: Tensor) -> Tensor | None: ...


@torch.inference_mode()
def pool(decoder: HiddenStates, hidden: Tensor, rows: Ordered[Work]) -> None:
    """Add the hidden states of a step to its pooled sequences, and set the `result` of those that end in it.

    `rows` are the pieces of the step in the order of the rows of `hidden`.
    """
    pooled: list[Work] = []
    starts: list[int] = []
    at = 0
    for piece in rows:
        if piece.sequence.is_pooled:
            pooled.append(piece)
            starts.append(at)
        at += piece.tokens
    if decoder.config.pooling == "mean":
        _add_sums(decoder, hidden, pooled, starts)
    ends = [index for index, piece in enumerate(pooled) if piece.tokens == piece.sequence.pending]
    if not ends:
        return
    sequences = [pooled[index].sequence for index in ends]
    if decoder.config.pooling == "mean":
        states = torch.stack([sequence.hidden_sum / len(sequence.tokens) for sequence in sequences])
    else:
        states = decoder.last_states(hidden, torch.tensor([starts[index] + pooled[index].tokens - 1 for index in ends]))
    scores = decoder.scores(states)
    results = (F.normalize(states, dim=1) if scores is None else scores).numpy()
    for sequence, result in zip(sequences, results, strict=True):
        sequence.result = result.tobytes()
        sequence.hidden_sum = None


def _add_sums(decoder: HiddenStates, hidden: Tensor, pooled: list[Work], starts: list[int]) -> None:
    lengths = torch.tensor([piece.tokens for piece in pooled])
    owner = torch.repeat_interleave(torch.arange(len(pooled)), lengths)
    within = torch.arange(len(owner)) - (lengths.cumsum(0) - lengths)[owner]
    states = decoder.last_states(hidden, torch.tensor(starts)[owner] + within)
    sums = torch.zeros(len(pooled), states.shape[1]).index_add_(0, owner, states)
    for piece, total in zip(pooled, sums, strict=True):
        sequence = piece.sequence
        # A sequence that was preempted is computed from its start again.
        sequence.hidden_sum = total if not sequence.computed else sequence.hidden_sum + total
