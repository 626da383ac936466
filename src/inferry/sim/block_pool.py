"""KV blocks: who holds them, and which of the others still hold a prefix that somebody may want again.

Law: held + idle + empty = all blocks. Held blocks are never evicted; idle ones go least recently used first.
"""

from collections.abc import Sequence
from itertools import islice

_EVICTION_BATCH = 512


class OutOfBlocks(RuntimeError):
    """Somebody took more than `available`."""


class BlockPool:
    """Counts blocks; a block with a hash holds a known piece of a known prefix and may be shared.

    Blocks without a hash are counted, not named: nobody else can use what is in them.
    """

    __slots__ = ("_held", "_idle", "_oldest", "anonymous", "hit_tokens", "queried_tokens", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.anonymous = 0
        self._held: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        # The idle blocks that go next. A dictionary that is emptied from its front is slow to find its first key.
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
        """Blocks that can be had now; cached prefixes give way."""
        return self.total - self.anonymous - len(self._held)

    def hits(self, hashes: Sequence[int]) -> int:
        """How many of the leading blocks are still there."""
        count = 0
        held, idle = self._held, self._idle
        for block in hashes:
            if block not in held and block not in idle:
                break
            count += 1
        return count

    def idle_among(self, hashes: Sequence[int], count: int) -> int:
        """How many of the first `count` blocks nobody holds: sharing them takes them from what is available."""
        held = self._held
        return sum([block not in held for block in islice(hashes, count)])

    def share(self, hashes: Sequence[int], count: int) -> None:
        """Hold the first `count` blocks, all of which are there."""
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
        """Hold `count` more blocks without a name."""
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
        """Name blocks that were taken; return the names that stuck. A prefix that is there already keeps its copy."""
        held, idle = self._held, self._idle
        hashed = [block for block in islice(hashes, start, stop) if block not in held and block not in idle]
        for block in hashed:
            held[block] = 1
        self.anonymous -= len(hashed)
        return hashed

    def release(self, hashed: Sequence[int], anonymous: int) -> None:
        """Give back. The end of a prefix is forgotten before its beginning."""
        self.anonymous -= anonymous
        held, idle = self._held, self._idle
        for block in reversed(hashed):
            holders = held[block] - 1
            if holders:
                held[block] = holders
            else:
                del held[block]
                idle[block] = None
