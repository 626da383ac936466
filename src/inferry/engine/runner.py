"""From planned work to sampled tokens: lays the step's tokens out in rows for the decoder and samples its logits."""

import os
from collections.abc import Sequence as Ordered
from pathlib import Path

import torch

from inferry.domain.jobs import Sampling
from inferry.engine.config import EngineConfig
from inferry.engine.loader import load_model
from inferry.engine.model import DecodeGroup, Decoder, PromptChunk, StepBatch
from inferry.engine.planner import Work
from inferry.engine.sampling import sample
from inferry.engine.sequences import Sequence

# Padding a sequence to its group's length is wasted reading; another group is another torch call per layer.
_GROUP_PADDING = 1.3
_GROUP_SLACK_BLOCKS = 16


class TorchRunner:
    """Executes steps on the CPU in float32. Owned by the engine's one thread."""

    def __init__(self, decoder: Decoder, block_tokens: int) -> None:
        self._decoder = decoder
        self._block_tokens = block_tokens
        self.context_tokens = decoder.config.context_tokens
        self.vocab_size = decoder.config.vocab_size
        self.eos_ids = decoder.config.eos_ids

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig) -> "TorchRunner":
        model, weights = load_model(model_dir, context_tokens=config.context_tokens)
        decoder = Decoder(model, weights, blocks=config.blocks, block_tokens=config.block_tokens)
        return cls(decoder, config.block_tokens)

    def warm_up(self) -> None:
        """The first pass of each kind allocates and initialises; that is not for the first caller to wait for."""
        size = self._block_tokens
        length = min(2 * size, self.context_tokens - 2)
        sampling = Sampling(temperature=0.0)
        if length < 1:
            return
        sequence = Sequence(0, [0] * length, sampling=sampling, lane=0, arrival=0, limit=length + 2)
        sequence.blocks = [0] * (length // size + 1)
        for tokens in (length, 1):
            self.execute([Work(sequence, tokens)])
            sequence.computed += tokens
            sequence.tokens.append(0)

    def execute(self, work: Ordered[Work]) -> list[int]:
        """Computes all of `work` in one pass; the tokens come back in the order of `work`."""
        singles = sorted((piece for piece in work if piece.tokens == 1), key=lambda piece: len(piece.sequence.blocks))
        rows = [*singles, *(piece for piece in work if piece.tokens > 1)]
        done = [piece for piece in rows if piece.tokens == piece.sequence.pending]
        batch = self._lay_out(rows, len(singles), len(done))
        logits = self._decoder.forward(batch)
        if not done:
            return []
        tokens = sample(logits, [piece.sequence for piece in done])
        by_key = {piece.sequence.key: token for piece, token in zip(done, tokens, strict=True)}
        return [by_key[piece.sequence.key] for piece in work if piece.sequence.key in by_key]

    def _lay_out(self, rows: Ordered[Work], singles: int, done: int) -> StepBatch:
        size = self._block_tokens
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_rows: list[int] = []
        chunks: list[PromptChunk] = []
        for piece in rows:
            sequence, first = piece.sequence, piece.sequence.computed
            blocks = sequence.blocks
            if piece.tokens == 1:
                ids.append(sequence.tokens[first])
                positions.append(first)
                slots.append(blocks[first // size] * size + first % size)
            else:
                end = first + piece.tokens
                chunks.append(self._chunk(len(ids), first, end, blocks))
                ids.extend(sequence.tokens[first:end])
                positions.extend(range(first, end))
                slots.extend(blocks[at // size] * size + at % size for at in range(first, end))
            if piece.tokens == sequence.pending:
                last_rows.append(len(ids) - 1)
        return StepBatch(
            ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            decodes=self._groups(rows[:singles]),
            chunks=chunks,
            last_rows=None if len(last_rows) == len(ids) else torch.tensor(last_rows, dtype=torch.long),
        )

    def _chunk(self, row: int, first: int, end: int, blocks: list[int]) -> PromptChunk:
        rows = end - first
        if first == 0:
            return PromptChunk(row, row + rows, rows, None, None)
        index = torch.tensor(blocks[: -(-end // self._block_tokens)])
        mask = torch.ones(rows, end, dtype=torch.bool).tril_(diagonal=first)
        return PromptChunk(row, row + rows, end, index, mask)

    def _groups(self, singles: Ordered[Work]) -> list[DecodeGroup]:
        """Singles come sorted by length, so neighbours share a group until padding costs more than another call."""
        size = self._block_tokens
        lengths = [piece.sequence.computed // size + 1 for piece in singles]
        groups: list[DecodeGroup] = []
        start = 0
        while start < len(singles):
            end, real = start, 0
            while end < len(singles):
                real += lengths[end]
                if lengths[end] * (end + 1 - start) > real * _GROUP_PADDING + _GROUP_SLACK_BLOCKS:
                    break
                end += 1
            groups.append(self._group(singles, start, end, lengths[end - 1]))
            start = end
        return groups

    def _group(self, singles: Ordered[Work], start: int, end: int, blocks: int) -> DecodeGroup:
        index: list[int] = []
        seen: list[int] = []
        for piece in singles[start:end]:
            mine = piece.sequence.blocks[: piece.sequence.computed // self._block_tokens + 1]
            index += mine
            index += mine[-1:] * (blocks - len(mine))
            seen.append(piece.sequence.computed + 1)
        keys = blocks * self._block_tokens
        visible = torch.arange(keys) < torch.tensor(seen).unsqueeze(1)
        mask = torch.zeros(len(seen), keys).masked_fill_(visible.logical_not_(), float("-inf"))
        return DecodeGroup(start, end, torch.tensor(index), keys, mask.view(len(seen), 1, 1, keys))


def set_threads(asked: int | None) -> int:
    """As asked; else half of the cores, because the gateway and its event loop need the other half."""
    threads = asked or max(1, (os.cpu_count() or 2) // 2)
    torch.set_num_threads(threads)
    return threads
