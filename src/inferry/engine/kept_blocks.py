"""Cached blocks that are kept for the next call of a run: evicted after all other cached blocks, for a bounded time."""

from collections import OrderedDict
from collections.abc import Iterable


class KeptBlocks:
    """Kept blocks by the run that used them last, the earliest deadline first.

    At most `max_blocks` are kept. Blocks that are kept no longer are returned.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, tuple[str, float]] = OrderedDict()
        self._by_run: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, run: str, block: int, until: float) -> None:
        """Keep a block. Deadlines do not decrease from call to call, and a run's blocks come last token first."""
        self._blocks[block] = (run, until)
        self._by_run.setdefault(run, {})[block] = None

    def discard(self, block: int) -> None:
        """A sequence claims the block, if it is kept at all."""
        found = self._blocks.pop(block, None)
        if found is not None:
            self._forget(found[0], block)

    def pop_first(self) -> int:
        """Take out the block that was kept first."""
        block, (run, _) = self._blocks.popitem(last=False)
        self._forget(run, block)
        return block

    def pop_surplus(self) -> list[int]:
        return self._pop(block for block, _ in zip(self._blocks, range(len(self) - self._max_blocks), strict=False))

    def pop_expired(self, now: float) -> list[int]:
        expired: list[int] = []
        for block, (_, until) in self._blocks.items():
            if until > now:
                break
            expired.append(block)
        return self._pop(expired)

    def pop_run(self, run: str) -> list[int]:
        """The run is over."""
        return self._pop(self._by_run.get(run, ()))

    def _pop(self, blocks: Iterable[int]) -> list[int]:
        taken = list(blocks)
        for block in taken:
            self.discard(block)
        return taken

    def _forget(self, run: str, block: int) -> None:
        blocks = self._by_run[run]
        del blocks[block]
        if not blocks:
            del self._by_run[run]
