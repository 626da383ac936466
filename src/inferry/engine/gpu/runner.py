"""Executes planned work on a device. A launched step runs while the next one is planned.

One thread owns the runner. Steps run in the order of their launches on one stream, so that a step may use the blocks
that an earlier one reads, and the tokens that the step before it samples. `collect` waits for the oldest step.
"""

from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch
from torch import Tensor

from inferry.domain.routes import Task
from inferry.domain.sampling import Sampling
from inferry.engine.gpu.decoder import GpuDecoder
from inferry.engine.gpu.graphs import Passes
from inferry.engine.gpu.metadata import Packed, Sections, host_sections, pack
from inferry.engine.gpu.sampling import choose_masked, draw_on_device
from inferry.engine.logprobs import TABLE_WIDTH, keep_logprobs, logprob_rows
from inferry.engine.model import probabilities
from inferry.engine.planner import Work
from inferry.engine.pooling import pool
from inferry.engine.sampling import fill_masks, mask_words
from inferry.engine.sequences import Sequence

_SLOTS = 3
"""Two steps may be in flight while a third one is packed."""


class _Slot:
    """Host memory of one step in flight, pinned for asynchronous copies."""

    def __init__(self, decoder: GpuDecoder) -> None:
        is_pinned = decoder.metadata.is_cuda
        self.metadata = torch.zeros_like(decoder.metadata, device="cpu", pin_memory=is_pinned)
        self.sections: Sections = host_sections(decoder.capacity, self.metadata.numpy())
        self.sampled = torch.zeros_like(decoder.sampled, device="cpu", pin_memory=is_pinned)
        self.done = torch.cuda.Event() if is_pinned else None  # type: ignore[no-untyped-call]
        self._masks: Tensor | None = None
        self._logprobs: Tensor | None = None

    def masks(self, decoder: GpuDecoder) -> Tensor:
        """Memory for the masks of grammars, allocated by the first that has one."""
        if self._masks is None:
            shape = (decoder.capacity.pieces, mask_words(decoder.config.vocab_size))
            self._masks = torch.zeros(shape, dtype=torch.int32, pin_memory=decoder.metadata.is_cuda)
        return self._masks

    def logprobs(self, decoder: GpuDecoder, table: Tensor) -> Tensor:
        """Copy log probabilities to the host. The memory is allocated by the first that asks."""
        if self._logprobs is None:
            places = decoder.capacity.pieces * TABLE_WIDTH
            self._logprobs = torch.zeros(places, dtype=torch.float64, pin_memory=decoder.metadata.is_cuda)
        return self._logprobs[: table.numel()].view(table.shape).copy_(table, non_blocking=True)

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


@dataclass(frozen=True)
class _Logprobs:
    """A table of `LogprobRows` in host memory, once the step is done."""

    table: Tensor
    sequences: list[Sequence]


@dataclass(frozen=True)
class _Step:
    work: Ordered[Work]
    sampled: list[Work]
    slot: _Slot
    logprobs: _Logprobs | None


class GpuRunner:
    """Runs steps on the decoder's device. At most two may be in flight."""

    def __init__(self, decoder: GpuDecoder, passes: Passes, score: Tensor | None = None) -> None:
        self._decoder = decoder
        self.adapters = decoder.adapters
        self._passes = passes
        self._slots = [_Slot(decoder) for _ in range(_SLOTS)]
        self._launched = 0
        self._in_flight: deque[_Step] = deque()
        self._sampled_at: dict[int, int] = {}
        self._pooled = _PooledStates(decoder, score)
        self.graph_bytes = passes.memory_bytes
        config = decoder.config
        self.context_tokens = config.context_tokens
        self.vocab_size = config.vocab_size
        self.eos_ids = config.eos_ids
        self.tasks = tuple(sorted(task.value for task in config.tasks))
        self.features = ("dimensions",) if config.has_dimensions else ()
        self.labels = config.labels

    @property
    def logits(self) -> Tensor:
        """Logits of the last launched step, one row per sampled token: single tokens first."""
        return self._decoder.logits

    def warm_up(self) -> None:
        """Run a step with a draw: kernels that no captured graph has are compiled by their first launch."""
        if Task.GENERATE not in self._decoder.config.tasks or self.context_tokens < 2:
            return
        sampling = Sampling(temperature=1.0, top_k=2, top_p=0.5)
        sequence = Sequence(0, [0], sampling=sampling, lane=0, arrival=0, limit=2)
        sequence.blocks = [0]
        self.execute([Work(sequence, 1)])

    def execute(self, work: Ordered[Work]) -> list[int]:
        """Compute all of `work` in one pass; return tokens in the order of `work`."""
        self.launch(work)
        return self.collect()

    def launch(self, work: Ordered[Work]) -> None:
        """Start a step. A pending token that is negative is the one sampled for its sequence by the step before."""
        slot = self._slots[self._launched % _SLOTS]
        slot.wait()
        self._launched += 1
        decoder = self._decoder
        slot_of = None if self.adapters is None else self.adapters.slots
        packed = pack(work, decoder.capacity, slot.sections, self._sampled_at, slot_of)
        decoder.metadata[: packed.used].copy_(slot.metadata[: packed.used], non_blocking=True)
        self._passes.body(packed)
        if any(piece.sequence.is_pooled for piece in packed.pieces):
            pool(self._pooled, decoder.logits, packed.pieces)
        logprobs: _Logprobs | None = None
        if packed.ending:
            logprobs = self._sample(packed, slot)
            count = len(packed.ending)
            slot.sampled[:count].copy_(decoder.sampled[:count], non_blocking=True)
        if slot.done is not None:
            slot.done.record()
        self._sampled_at = {piece.sequence.key: index for index, piece in enumerate(packed.ending)}
        self._in_flight.append(_Step(work, packed.ending, slot, logprobs))

    def collect(self) -> list[int]:
        """The tokens of the oldest step in flight, in the order of its work."""
        step = self._in_flight.popleft()
        step.slot.wait()
        tokens: list[int] = step.slot.sampled[: len(step.sampled)].tolist()
        if step.logprobs is not None:
            keep_logprobs(step.logprobs.table, step.logprobs.sequences)
        by_key = {piece.sequence.key: token for piece, token in zip(step.sampled, tokens, strict=True)}
        return [by_key[piece.sequence.key] for piece in step.work if piece.sequence.key in by_key]

    def _sample(self, packed: Packed, slot: _Slot) -> _Logprobs | None:
        decoder = self._decoder
        self._passes.tail(len(packed.ending))
        # Outside the captured graph, for the rows that ask only.
        logprobs = logprob_rows(decoder.logits, [piece.sequence for piece in packed.ending])
        constrained = [row for row, piece in enumerate(packed.ending) if piece.sequence.matcher is not None]
        if constrained:
            # The host computes the masks while the device computes the pass.
            masks = slot.masks(decoder)[: len(constrained)]
            fill_masks(masks, [packed.ending[row].sequence for row in constrained])
            choose_masked(decoder.logits, decoder.sampled, constrained, masks)
        drawn = [row for row, piece in enumerate(packed.ending) if piece.sequence.sampling.temperature > 0]
        if drawn:
            sequences: list[Sequence] = [packed.ending[row].sequence for row in drawn]
            rows = torch.tensor(drawn).to(decoder.logits.device, non_blocking=True)
            decoder.sampled[rows] = draw_on_device(decoder.logits[rows], sequences)
        if logprobs is None:
            return None
        return _Logprobs(slot.logprobs(decoder, logprobs.table(decoder.sampled)), logprobs.sequences)


class _PooledStates:
    """Hidden states of the last step for pooling, which is computed on the host."""

    def __init__(self, decoder: GpuDecoder, score: Tensor | None) -> None:
        self.config = decoder.config
        self._decoder = decoder
        self._score = None if score is None else score.t().float().cpu()

    def last_states(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self._decoder.states(rows.to(hidden.device, torch.int32)).float().cpu()

    def scores(self, states: Tensor) -> Tensor | None:
        return None if self._score is None else probabilities(self.config, torch.mm(states, self._score))
