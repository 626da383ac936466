"""Builders of steps for tests of the kernels."""

import random

import numpy as np
import torch
from torch import Tensor

from inferry.domain.sampling import Sampling
from inferry.engine.gpu.metadata import Capacity, Packed, host_sections, pack, section_lengths
from inferry.engine.gpu.tensors import LayerCache, StepTensors, step_tensors
from inferry.engine.planner import Work
from inferry.engine.sequences import Sequence

BLOCK_TOKENS = 8
BLOCKS = 64


def a_piece(key: int, computed: int, tokens: int, *, more: int = 0, blocks: list[int] | None = None) -> Work:
    """A piece of a sequence with `more` pending tokens after it."""
    generator = random.Random(key)
    ids = [generator.randrange(1, 50) for _ in range(computed + tokens + more)]
    sequence = Sequence(key, ids, sampling=Sampling(temperature=0.0), lane=0, arrival=key, limit=1_000)
    sequence.computed = computed
    sequence.blocks = blocks or []
    return Work(sequence, tokens)


def spread(pieces: list[Work], block_tokens: int = BLOCK_TOKENS, blocks: int = BLOCKS) -> list[Work]:
    """Give every sequence blocks in random order."""
    free = list(range(blocks))
    random.Random(5).shuffle(free)
    for piece in pieces:
        need = -(-len(piece.sequence.tokens) // block_tokens)
        piece.sequence.blocks, free = free[:need], free[need:]
    return pieces


def a_capacity(
    rows: int = 96, pieces: int = 8, *, tile_queries: int = 32, block_tokens: int = BLOCK_TOKENS, adapters: int = 0
) -> Capacity:
    return Capacity(
        rows=rows,
        pieces=pieces,
        blocks=256,
        tile_queries=tile_queries,
        block_tokens=block_tokens,
        adapters=adapters,
    )


def packed_tensors(
    work: list[Work],
    capacity: Capacity,
    sampled_at: dict[int, int] | None = None,
    device: str = "cpu",
    slots: dict[int, int] | None = None,
) -> tuple[Packed, StepTensors]:
    # Garbage where nothing is packed: kernels must not depend on it.
    array = np.full(sum(section_lengths(capacity).values()), 1_000_000, dtype=np.int32)
    packed = pack(work, capacity, host_sections(capacity, array), sampled_at or {}, slots)
    return packed, step_tensors(capacity, torch.from_numpy(array).to(device))


def a_cache(kv_heads: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> LayerCache:
    shape = (BLOCKS, kv_heads, BLOCK_TOKENS, dim)
    return LayerCache(*(torch.randn(shape, device=device).to(dtype) for _ in range(2)))


def random_rows(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randn(rows, width, device=device).to(dtype)
