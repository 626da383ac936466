"""Log probabilities of sampled tokens by the model's logits, before temperature, limits and grammars change them.

Only rows of sequences that ask are computed, on the device of the logits.
"""

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from inferry.engine.messages import MAX_TOP_LOGPROBS
from inferry.engine.sampling import MAX_DRAWN_LOGITS
from inferry.engine.sequences import Sequence

TABLE_WIDTH = 1 + 2 * MAX_TOP_LOGPROBS


class LogprobRows:
    """The rows of a step whose sequences ask. Made before a token is sampled, because grammars overwrite logits.

    A grammar leaves the logits of the tokens that it allows, so that of the sampled token is read afterwards.
    """

    @torch.inference_mode()
    def __init__(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self._logits = logits
        self._rows = torch.tensor(rows).to(logits.device, non_blocking=True)
        self._top = min(max(_top(sequence) for sequence in sequences), logits.shape[-1])
        # In groups, as rows are drawn: each group is copied in float32.
        at_once = max(1, MAX_DRAWN_LOGITS // logits.shape[-1])
        groups = [self._normalised(part) for part in torch.split(self._rows, at_once)]
        self._log_sums, self._values, self._ids = (torch.cat(parts) for parts in zip(*groups, strict=True))

    @torch.inference_mode()
    def table(self, sampled: Tensor) -> Tensor:
        """By row: the log probability of its token in `sampled`, those of the most likely tokens, and their ids.

        All in float64, which holds ids exactly, so that one copy brings them to the host.
        """
        chosen = self._logits[self._rows, sampled[self._rows]].unsqueeze(1).double() - self._log_sums.double()
        return torch.cat((chosen, self._values.double(), self._ids.double()), dim=1)

    def _normalised(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._logits[rows].float()
        log_sums = logits.logsumexp(dim=-1, keepdim=True)
        values, ids = logits.topk(self._top, dim=-1)
        return log_sums, values - log_sums, ids


def logprob_rows(logits: Tensor, sequences: Ordered[Sequence]) -> LogprobRows | None:
    """The rows that ask, one row of the logits per sequence; None where none does."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    return LogprobRows(logits, rows, [sequences[row] for row in rows]) if rows else None


def keep_logprobs(table: Tensor, sequences: Ordered[Sequence]) -> None:
    """Set the log probabilities of the last token of each sequence from its row of a table on the host."""
    for sequence, (chosen, *rest) in zip(sequences, table.tolist(), strict=True):
        middle, top = len(rest) // 2, min(_top(sequence), len(rest) // 2)
        ids = map(int, rest[middle : middle + top])
        sequence.logprobs = (chosen, list(zip(ids, rest[:top], strict=True)))


def _top(sequence: Sequence) -> int:
    return sequence.sampling.logprobs or 0
