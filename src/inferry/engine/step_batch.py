"""The tokens of one step as the decoder on a CPU takes them: rows, and what each of them sees of the KV cache."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from torch import Tensor

from inferry.engine.lora import AdapterRows

Tiles = Tensor | range
"""Numbers of tiles by sequence, then tile of a block, then block; or the neighbouring blocks of one sequence, which are
read in place."""


@dataclass(frozen=True)
class FewDecodes:
    """The first `rows` rows are one token each of a few sequences, padded to the longest.

    `tiles` selects the tiles of each; `keys` of them are read. `mask` is 0 for visible keys and -inf for padding, None
    if all are visible. `sliding_mask` replaces it in layers with a window; None if the window hides nothing, here and
    below. Rows are computed in groups of `at_once`, which limits how much is copied out of the cache.
    """

    rows: int
    tiles: Tiles
    keys: int
    mask: Tensor | None
    sliding_mask: Tensor | None = None
    at_once: int = 1


@dataclass(frozen=True)
class ManyDecodes:
    """The first `rows` rows are one token each of many sequences, whose blocks are read in any order.

    `read` selects the blocks; a number means the range that starts there, which needs no copy. `owner` is the row
    of each block; `mask` is -inf for keys that the row does not see, possibly for all keys of a block. `blocks_of_row`
    has the positions of each row's blocks, padded with the position after all blocks. `places`: where each block is in
    `blocks_of_row`, if rows have about equally many; their scores are then arranged by row.
    """

    rows: int
    read: Tensor | int
    owner: Tensor
    mask: Tensor
    blocks_of_row: Tensor
    places: Tensor | None = None
    sliding_mask: Tensor | None = None


@dataclass(frozen=True)
class PromptChunk:
    """Rows [start, end) are consecutive tokens of one sequence; the last one sees `keys` tokens.

    The first chunk of a sequence sees only itself and needs neither tiles nor mask.
    """

    start: int
    end: int
    keys: int
    tiles: Tiles | None
    mask: Tensor | None
    sliding_mask: Tensor | None = None


@dataclass(frozen=True)
class PaddedPrompts:
    """The last rows of a batch: whole prompts of several sequences, padded to the longest.

    `rows` [prompts, longest] are the rows of each prompt, the last one repeated; `places` are the places of the real
    tokens among them.
    """

    rows: Tensor
    places: Tensor
    sliding_mask: Tensor | None = None


@dataclass(frozen=True)
class StepBatch:
    """All tokens of one step, one row each. Built once per step and used by every layer.

    `slots` are the cache rows of every token's keys by head, then of its values: one per tile of its block. `adapters`
    are the rows that use LoRA adapters.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: FewDecodes | ManyDecodes | None
    chunks: Ordered[PromptChunk]
    last_rows: Tensor | None
    padded: PaddedPrompts | None = None
    adapters: Ordered[AdapterRows] = ()
