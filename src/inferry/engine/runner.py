"""Executes planned work: arranges tokens in rows, runs the decoder, samples its logits."""

import os
from collections.abc import Sequence as Ordered
from pathlib import Path

import torch

from inferry.domain.routes import Task
from inferry.domain.sampling import Sampling
from inferry.engine.checkpoint import read_config
from inferry.engine.config import EngineConfig
from inferry.engine.cpu_adapters import CpuAdapters
from inferry.engine.device_memory import cpu_memory
from inferry.engine.dtypes import check_cpu_dtype, resolve_dtype
from inferry.engine.loader import load_model
from inferry.engine.logprobs import keep_logprobs, logprob_rows
from inferry.engine.memory import MAX_COPIED_BLOCKS, RUNTIME_BYTES, MemoryModel, fitted
from inferry.engine.model import Decoder
from inferry.engine.planner import Work
from inferry.engine.pooling import pool
from inferry.engine.sampling import sample
from inferry.engine.sequences import Sequence
from inferry.engine.step_batch import FewDecodes, ManyDecodes, PaddedPrompts, PromptChunk, StepBatch, Tiles

# Up to this many blocks decodes are padded to one tensor (fewer calls, more copying); beyond, read by block.
MAX_FEW_BLOCKS = 48
# Minimum share of needed blocks for reading a whole range.
_MIN_BLOCK_DENSITY = 0.5
# Minimum share of blocks in rows padded to the longest, for scores that are arranged by row.
_MIN_ROW_DENSITY = 0.5
# Longer prompts are not padded to a common length: most of the work would be padding.
_MAX_PADDED_TOKENS = 64


class TorchRunner:
    """Executes steps on the CPU. Owned by the engine's one thread.

    `pads`: decodes read keys padded to the longest, however many they are.
    """

    def __init__(
        self, decoder: Decoder, block_tokens: int, *, pads: bool = False, adapters: CpuAdapters | None = None
    ) -> None:
        self._decoder = decoder
        self.adapters = adapters
        self._pads = pads
        self._block_tokens = block_tokens
        # The first tile of each head's keys and values, and its first row.
        self._first_tiles = torch.arange(decoder.config.tiles).unsqueeze(1) * decoder.blocks
        self._first_rows = self._first_tiles.view(-1) * block_tokens
        self._window = decoder.config.window
        self.context_tokens = decoder.config.context_tokens
        self.vocab_size = decoder.config.vocab_size
        self.eos_ids = decoder.config.eos_ids
        self.tasks = tuple(sorted(task.value for task in decoder.config.tasks))
        self.features = ("dimensions",) if decoder.config.has_dimensions else ()
        self.labels = decoder.config.labels

    @classmethod
    def load(cls, model_dir: Path, config: EngineConfig) -> "TorchRunner":
        dtype: torch.dtype = getattr(torch, cpu_dtype(config))
        model, weights = load_model(model_dir, context_tokens=config.context_tokens, dtype=dtype)
        decoder = Decoder(model, weights, blocks=config.cache_blocks, block_tokens=config.block_tokens)
        adapters = CpuAdapters(model_dir, model, config, dtype) if config.max_adapters else None
        return cls(decoder, config.block_tokens, pads=config.pads, adapters=adapters)

    def warm_up(self) -> None:
        """Run one pass of each kind: the first one allocates, which would delay the first request."""
        size = self._block_tokens
        length = min(2 * size, self.context_tokens - 2)
        sampling = Sampling(temperature=0.0)
        if length < 1:
            return
        is_pooled = Task.GENERATE not in self._decoder.config.tasks
        sequence = Sequence(
            0, [0] * length, sampling=sampling, lane=0, arrival=0, limit=length + 2, is_pooled=is_pooled
        )
        sequence.blocks = [0] * (length // size + 1)
        for tokens in (length,) if is_pooled else (length, 1):
            self.execute([Work(sequence, tokens)])
            sequence.computed += tokens
            sequence.tokens.append(0)

    def execute(self, work: Ordered[Work]) -> list[int]:
        """Compute all of `work` in one pass; return tokens in the order of `work`."""
        singles = [piece for piece in work if piece.tokens == 1]
        padded = [piece for piece in work if _can_pad(piece)]
        chunks = [piece for piece in work if piece.tokens > 1 and not _can_pad(piece)]
        rows = [*singles, *chunks, *padded]
        done = [p for p in rows if p.tokens == p.sequence.pending and not p.sequence.is_pooled]
        batch = self._lay_out(rows, len(singles), len(padded))
        hidden = self._decoder.hidden(batch)
        if any(piece.sequence.is_pooled for piece in rows):
            pool(self._decoder, hidden, rows)
        if not done:
            return []
        logits, sequences = self._decoder.logits(hidden, batch.last_rows), [piece.sequence for piece in done]
        logprobs = logprob_rows(logits, sequences)
        tokens = sample(logits, sequences)
        if logprobs is not None:
            keep_logprobs(logprobs.table(torch.tensor(tokens)), logprobs.sequences)
        by_key = {piece.sequence.key: token for piece, token in zip(done, tokens, strict=True)}
        return [by_key[piece.sequence.key] for piece in work if piece.sequence.key in by_key]

    def _lay_out(self, rows: Ordered[Work], singles: int, padded: int) -> StepBatch:
        size = self._block_tokens
        whole = rows[len(rows) - padded :]
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
                if not _can_pad(piece):
                    chunks.append(self._chunk(len(ids), first, end, blocks))
                ids.extend(sequence.tokens[first:end])
                positions.extend(range(first, end))
                slots.extend([blocks[at // size] * size + at % size for at in range(first, end)])
            if piece.tokens == sequence.pending and not sequence.is_pooled:
                last_rows.append(len(ids) - 1)
        return StepBatch(
            ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=(torch.tensor(slots).unsqueeze(1) + self._first_rows).view(-1),
            decodes=self._decodes(rows[:singles]),
            chunks=chunks,
            last_rows=None if len(last_rows) == len(ids) else torch.tensor(last_rows, dtype=torch.long),
            padded=_padded(whole, len(ids), self._window) if whole else None,
            adapters=() if self.adapters is None else self.adapters.groups(rows),
        )

    def _chunk(self, row: int, first: int, end: int, blocks: list[int]) -> PromptChunk:
        rows = end - first
        sliding_mask = _causal_mask(first, end, self._window) if _hides(self._window, end) else None
        if first == 0:
            return PromptChunk(row, row + rows, rows, None, None, sliding_mask)
        tiles = self._tiles([blocks[: -(-end // self._block_tokens)]])
        return PromptChunk(row, row + rows, end, tiles, _causal_mask(first, end), sliding_mask)

    def _decodes(self, singles: Ordered[Work]) -> FewDecodes | ManyDecodes | None:
        if not singles:
            return None
        size = self._block_tokens
        seen = [piece.sequence.computed + 1 for piece in singles]
        blocks = [piece.sequence.blocks[: -(-count // size)] for piece, count in zip(singles, seen, strict=True)]
        longest = max(map(len, blocks))
        if self._pads or len(singles) == 1 or longest * len(singles) <= MAX_FEW_BLOCKS:
            return self._few(blocks, seen, longest)
        return _many(blocks, seen, longest, size, self._window if _hides(self._window, max(seen)) else None)

    def _few(self, blocks: list[list[int]], seen: list[int], longest: int) -> FewDecodes:
        rows, at_once = len(blocks), max(1, MAX_COPIED_BLOCKS // longest)
        window = self._window if _hides(self._window, max(seen)) else None
        if rows == 1:
            # Only what is visible is read, so that only a window needs a mask.
            sliding_mask = None if window is None else self._few_mask(seen, seen[0], window)
            return FewDecodes(1, self._tiles(blocks), seen[0], None, sliding_mask)
        keys = longest * self._block_tokens
        padded = [own_rows + own_rows[-1:] * (longest - len(own_rows)) for own_rows in blocks]
        sliding_mask = None if window is None else self._few_mask(seen, keys, window)
        return FewDecodes(rows, self._tiles(padded), keys, self._few_mask(seen, keys), sliding_mask, at_once)

    def _few_mask(self, seen: list[int], keys: int, window: int | None = None) -> torch.Tensor:
        return _mask(torch.tensor(seen), keys, window).to(self._decoder.dtype).view(len(seen), 1, 1, -1)

    def _tiles(self, blocks: list[list[int]]) -> Tiles:
        """Tiles of equally many blocks per sequence."""
        if len(blocks) == 1 and _are_neighbours(blocks[0]):
            return range(blocks[0][0], blocks[0][-1] + 1)
        return (torch.tensor(blocks).unsqueeze(1) + self._first_tiles).view(-1)


def _are_neighbours(blocks: list[int]) -> bool:
    first = blocks[0]
    return blocks[-1] - first == len(blocks) - 1 and blocks == list(range(first, first + len(blocks)))


def _can_pad(piece: Work) -> bool:
    """Whether the piece is a short prompt, whole, of a pooled sequence: such prompts attend in one call."""
    sequence = piece.sequence
    return sequence.is_pooled and 1 < piece.tokens <= _MAX_PADDED_TOKENS and piece.tokens == len(sequence.tokens)


def _padded(whole: Ordered[Work], rows: int, window: int | None) -> PaddedPrompts:
    """The last prompts of a batch with `rows` rows."""
    lengths = torch.tensor([piece.tokens for piece in whole])
    firsts = rows - int(lengths.sum()) + lengths.cumsum(0) - lengths
    columns = torch.arange(int(lengths.max()))
    index = firsts.unsqueeze(1) + torch.minimum(columns, lengths.unsqueeze(1) - 1)
    places = (columns < lengths.unsqueeze(1)).view(-1).nonzero().view(-1)
    sliding_mask = _causal_mask(0, len(columns), window) if _hides(window, len(columns)) else None
    return PaddedPrompts(index, places, sliding_mask)


def reads_range(listed: list[int]) -> bool:
    """Whether decodes read all blocks from the first to the last of these in place, and do not copy them.

    Reading is faster where most blocks of the range are needed. A block that several sequences share is read once for
    each of them, which a range cannot.
    """
    reach = max(listed) + 1 - min(listed)
    return len(listed) >= reach * _MIN_BLOCK_DENSITY and len(set(listed)) == len(listed)


def _many(blocks: list[list[int]], seen: list[int], longest: int, size: int, window: int | None) -> ManyDecodes:
    rows = len(blocks)
    listed = [block for own_rows in blocks for block in own_rows]
    flat = torch.tensor(listed)
    lengths = torch.tensor([len(own_rows) for own_rows in blocks])
    starts = lengths.cumsum(0) - lengths
    owner = torch.repeat_interleave(torch.arange(rows), lengths)
    column = torch.arange(len(flat)) - starts[owner]
    visible = torch.tensor(seen)[owner] - column * size
    places = owner * longest + column
    read: torch.Tensor | int = flat
    positions, blocks_read = torch.arange(len(flat)), len(flat)
    if reads_range(listed):
        read, blocks_read = min(listed), max(listed) + 1 - min(listed)
        positions = flat - read
    blocks_of_row = torch.full((rows * longest,), blocks_read).scatter_(0, places, positions)
    if isinstance(read, int):
        # A block that is not needed is masked completely, so neither its owner nor its place matters.
        spread = torch.zeros(3, blocks_read, dtype=torch.long)
        owner, visible, places = spread.index_copy_(1, positions, torch.stack((owner, visible, places))).unbind()
    is_even = rows * longest * _MIN_ROW_DENSITY <= len(flat)
    sliding_mask = None if window is None else _mask(visible, size, window).unsqueeze(1)
    mask = _mask(visible, size).unsqueeze(1)
    return ManyDecodes(rows, read, owner, mask, blocks_of_row, places if is_even else None, sliding_mask)


def _hides(window: int | None, tokens: int) -> bool:
    """Whether a window hides a token from the last of `tokens`."""
    return window is not None and tokens > window


def _mask(visible: torch.Tensor, keys: int, window: int | None = None) -> torch.Tensor:
    """[rows, keys]: 0 for the visible keys of each row, the last `window` of them, and -inf for others."""
    places = torch.arange(keys)
    hidden = places >= visible.unsqueeze(1)
    if window is not None:
        hidden |= places < visible.unsqueeze(1) - window
    return torch.zeros(len(visible), keys).masked_fill_(hidden, float("-inf"))


def _causal_mask(first: int, end: int, window: int | None = None) -> torch.Tensor:
    """[end - first, end]: whether the token of each row sees each key."""
    mask = torch.ones(end - first, end, dtype=torch.bool).tril_(diagonal=first)
    return mask if window is None else mask.triu_(diagonal=first - window + 1)


def cpu_dtype(config: EngineConfig) -> str:
    """The dtype that steps are computed in, which the CPU has been tested for."""
    dtype = resolve_dtype(config.dtype, "float32", "cpu")
    check_cpu_dtype(dtype)
    return dtype


def fitted_to_cpu(model_dir: Path, config: EngineConfig) -> EngineConfig:
    """The configuration with a size of the KV cache that fits into the memory of this machine, or OutOfMemory."""
    model = read_config(model_dir, context_tokens=config.context_tokens)
    memory = MemoryModel(model, resolve_dtype(config.dtype, model.dtype, "cpu"))
    total, available = cpu_memory()
    # The runtime of this process is not part of what is available any more.
    return fitted(memory, config, total, available + RUNTIME_BYTES["cpu"])


def cuda_memory() -> int | None:
    """Bytes of the first GPU; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def set_threads(requested: int | None) -> int:
    """The configured number, else half of the cores: the gateway needs the other half."""
    threads = requested or max(1, (os.cpu_count() or 2) // 2)
    torch.set_num_threads(threads)
    return threads
