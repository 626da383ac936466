"""KV blocks of the simulated engine: held, idle with a cached prefix, or empty.

Invariant: held + idle + empty = all blocks. Held blocks are never evicted; idle ones are, least recently used first.
"""

from collections.abc import Sequence
from itertools import islice

_EVICTION_BATCH = 512


class OutOfBlocks(RuntimeError):
    """More blocks were taken than are `available`."""


class BlockPool:
    """Counts blocks. A block with a hash holds a known piece of a prefix and may be shared.

    Blocks without a hash are only counted: no other sequence can use them.
    """

    __slots__ = ("_held", "_idle", "_oldest", "anonymous", "hit_tokens", "queried_tokens", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.anonymous = 0
        self._held: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        # The idle blocks to evict next. A dictionary that is emptied from its front is slow to find its first key.
        self._oldest: dict[int, None] = {}
        self.queried_tokens = 0
        self.hit_tokens = 0

    @property
    def held(self) -> int:
        return self.anonymous + len(self._held)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def empty(self) -> int:
        return self.total - self.anonymous - len(self._held) - len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that can be taken now; idle ones are evicted."""
        return self.total - self.anonymous - len(self._held)

    def hits(self, hashes: Sequence[int]) -> int:
        """How many of the leading blocks are cached."""
        count = 0
        held, idle = self._held, self._idle
        for block in hashes:
            if block not in held and block not in idle:
                break
            count += 1
        return count

    def idle_among(self, hashes: Sequence[int], count: int) -> int:
        """How many of the first `count` blocks are idle: to share them takes them from `available`."""
        held = self._held
        return sum([block not in held for block in islice(hashes, count)])

    def share(self, hashes: Sequence[int], count: int) -> None:
        """Hold the first `count` blocks, all of which are cached."""
        held, idle, oldest = self._held, self._idle, self._oldest
        for block in islice(hashes, count):
            holders = held.get(block)
            if holders is None:
                del idle[block]
                if oldest:
                    oldest.pop(block, None)
                held[block] = 1
            else:
                held[block] = holders + 1

    def take(self, count: int) -> None:
        """Hold `count` more blocks without a hash."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.available} available")
        short = count - self.empty
        self.anonymous += count
        idle = self._idle
        while short > 0:
            if not self._oldest:
                self._oldest = dict.fromkeys(islice(idle, _EVICTION_BATCH))
            for block in list(islice(self._oldest, short)):
                del self._oldest[block], idle[block]
                short -= 1

    def publish(self, hashes: Sequence[int], start: int, stop: int) -> list[int]:
        """Give hashes to blocks that were taken; the hashes that were new. A cached prefix keeps its own block."""
        held, idle = self._held, self._idle
        hashed = [block for block in islice(hashes, start, stop) if block not in held and block not in idle]
        for block in hashed:
            held[block] = 1
        self.anonymous -= len(hashed)
        return hashed

    def release(self, hashed: Sequence[int], anonymous: int) -> None:
        """Release blocks. The end of a prefix is evicted before its beginning."""
        self.anonymous -= anonymous
        held, idle = self._held, self._idle
        for block in reversed(hashed):
            holders = held[block] - 1
            if holders:
                held[block] = holders
            else:
                del held[block]
                idle[block] = None


class BlockDemand:
    """New blocks that decoding sequences need, by step: each needs one every `block_tokens` steps."""

    __slots__ = ("_by_residue", "_sequences")

    def __init__(self, block_tokens: int) -> None:
        self._by_residue = [0] * block_tokens
        self._sequences = 0

    def add(self, computed: int, step: int) -> None:
        """A sequence with this many computed tokens decodes from this step on."""
        self._by_residue[(computed - step) % len(self._by_residue)] += 1
        self._sequences += 1

    def remove(self, computed: int, step: int) -> None:
        """The opposite of `add`, with the same arguments."""
        self._by_residue[(computed - step) % len(self._by_residue)] -= 1
        self._sequences -= 1

    def at(self, step: int) -> int:
        """Blocks needed in this step."""
        return self._by_residue[-step % len(self._by_residue)]

    def in_steps(self, step: int, count: int) -> int:
        """Blocks needed in `count` steps from this one on."""
        by_residue, block = self._by_residue, len(self._by_residue)
        rounds, rest = divmod(count, block)
        return rounds * self._sequences + sum([by_residue[(-step - i) % block] for i in range(rest)])
