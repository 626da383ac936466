"""Block pool of the paged KV cache: which sequences hold a block, which blocks are cached, which is evicted first."""

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from heapq import heapify, heappop, heappush

from inferry.engine.kept_blocks import KeptBlocks

_MAX_KEPT_SHARE = 0.5
"""The most of the pool that is kept for paused runs: the rest is cached by last use alone."""


class OutOfBlocks(RuntimeError):
    """Too few blocks are free. Nothing was changed. The planner prevents this."""


class BlockPool:
    """Blocks of a fixed number of tokens. A block is held by one or more sequences, or cached, or empty.

    A full block may be named by a key (`prefix_keys`). When its last holder releases it, it stays cached under that key
    until its place is needed; blocks without a name become empty. Only full blocks are shared, and no sequence writes
    to a full block, so a shared block never changes.

    Rule: empty + cached + held = all, `free` is empty + cached, and a call that fails changes nothing. The blocks of a
    sequence are in token order. The lowest empty blocks are allocated first, so that the blocks in use are close
    together and can be read as one range. Cached blocks are evicted by their last use, and a block after the blocks
    that follow it, because a prefix is found from its first block on. Blocks that are kept for a run are evicted after
    all others. A block that is kept no longer loses this preference and nothing else: other runs may use it too.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError("a block pool needs at least one block of at least one token")
        self.total = blocks
        self.block_tokens = block_tokens
        self._is_empty = bytearray(b"\x01") * blocks
        self._empty = blocks
        self._lowest = 0  # no block below it is empty
        self._held: dict[int, list[int]] = {}
        self._holders = [0] * blocks
        self._is_held = bytearray(blocks)
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._cached: set[int] = set()  # without kept ones
        self._by_use: list[tuple[int, int]] = []  # a heap of last use and block; entries of earlier uses remain
        self._last_use = [0] * blocks
        self._uses = 0
        self._kept = KeptBlocks(int(blocks * _MAX_KEPT_SHARE))

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        return self._empty + self.cached

    @property
    def cached(self) -> int:
        """Blocks that no sequence holds and that can be found by their key, kept ones included."""
        return len(self._cached) + len(self._kept)

    @property
    def kept(self) -> int:
        """Cached blocks that are kept for the next call of a run."""
        return len(self._kept)

    @property
    def held(self) -> int:
        return self.total - self.free

    @property
    def span(self) -> int:
        """Blocks from the first to the last held one. As many as are held: they can be read as one range."""
        return self._is_held.rfind(1) + 1 - max(0, self._is_held.find(1))

    @property
    def holders(self) -> int:
        return len(self._held)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def blocks_of(self, owner: int) -> list[int]:
        return self._held.get(owner, [])

    def holders_of(self, block: int) -> int:
        return self._holders[block]

    def extend(self, owner: int, tokens: int) -> list[int]:
        """Allocate blocks until the owner can hold `tokens`; return all its blocks. Never frees any."""
        own_blocks = self._held.get(owner)
        held = 0 if own_blocks is None else len(own_blocks)
        need = self.blocks_for(tokens) - held
        if need > self.free:
            raise OutOfBlocks(f"{need} blocks needed, {self.free} free")
        if own_blocks is None:
            own_blocks = self._held[owner] = []
        if need > 0:
            own_blocks.extend(self._take(need))
        return own_blocks

    def release(self, owner: int, run: str | None = None, keep_until: float = 0.0) -> int:
        """Give up all blocks of the owner; return their number. Those that are cached now are kept for the run."""
        blocks = self._held.pop(owner, [])
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            self._is_held[block] = 0
            self._uses += 1
            self._last_use[block] = self._uses
            if block not in self._key_of:
                self._set_empty(block)
            elif run is None:
                self._cache(block)
            else:
                self._kept.add(run, block, keep_until)
        self._stop_keeping(self._kept.pop_surplus())
        return len(blocks)

    def expire(self, now: float) -> None:
        """Keep blocks no longer whose time is over."""
        self._stop_keeping(self._kept.pop_expired(now))

    def end_run(self, run: str) -> None:
        """Keep no blocks for a run that is over. They stay cached."""
        self._stop_keeping(self._kept.pop_run(run))

    # -- prefixes ----------------------------------------------------------------------------------------------------

    def find(self, keys: Ordered[bytes]) -> list[int]:
        """The blocks of the longest prefix that is there, held or cached."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def claim(self, owner: int, blocks: Ordered[int]) -> None:
        """Let an owner without blocks hold these found ones."""
        if self._held.get(owner):
            raise ValueError("a prefix is claimed before other blocks are allocated")
        for block in blocks:
            self._holders[block] += 1
            self._is_held[block] = 1
            self._cached.discard(block)
            self._kept.discard(block)
        self._held[owner] = list(blocks)

    def name(self, owner: int, first: int, keys: Ordered[bytes]) -> None:
        """The owner's blocks from `first` on are full and computed, and have these keys.

        A key that another block has already stays there: two sequences have computed the same prefix at the same time.
        """
        own_blocks = self._held[owner]
        for index, key in enumerate(keys, first):
            if key not in self._by_key:
                self._by_key[key] = own_blocks[index]
                self._key_of[own_blocks[index]] = key

    def count_held(self, blocks: Ordered[int]) -> int:
        """How many of these found blocks a sequence holds: to claim them takes nothing from `free`."""
        return sum(1 for block in blocks if self._holders[block])

    def count_freed(self, blocks: Ordered[int], released: dict[int, int]) -> int:
        """How many blocks become free when a holder of `blocks` releases them.

        `released` has the releases assumed before, by block, and is updated: a shared block is free after its last one.
        """
        freed = 0
        for block in blocks:
            times = released[block] = released.get(block, 0) + 1
            freed += self._holders[block] == times
        return freed

    # -- allocation --------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> list[int]:
        for _ in range(count - self._empty):
            self._evict()
        blocks_taken: list[int] = []
        at = self._lowest
        for _ in range(count):
            at = self._is_empty.index(1, at)
            self._is_empty[at] = 0
            self._holders[at] = self._is_held[at] = 1
            blocks_taken.append(at)
        self._lowest = at
        self._empty -= count
        return blocks_taken

    def _evict(self) -> None:
        block = self._pop_least_recent() if self._cached else self._kept.pop_first()
        del self._by_key[self._key_of.pop(block)]
        self._set_empty(block)

    def _stop_keeping(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._cache(block)

    def _cache(self, block: int) -> None:
        self._cached.add(block)
        if len(self._by_use) >= 2 * self.total:
            self._by_use = [(self._last_use[cached], cached) for cached in self._cached]
            heapify(self._by_use)
        else:
            heappush(self._by_use, (self._last_use[block], block))

    def _pop_least_recent(self) -> int:
        while True:
            use, block = heappop(self._by_use)
            if block in self._cached and use == self._last_use[block]:
                self._cached.remove(block)
                return block

    def _set_empty(self, block: int) -> None:
        self._is_empty[block] = 1
        self._empty += 1
        self._lowest = min(self._lowest, block)
