"""Block pool of the paged KV cache, in plain ints: which sequence holds which block."""


class OutOfBlocks(RuntimeError):
    """Too few blocks are free. Nothing was changed. The planner prevents this."""


class BlockPool:
    """Blocks of a fixed number of tokens, each held by at most one sequence.

    Rule: free + held = all, and a call that fails changes nothing. The blocks of a sequence are in token order. The
    lowest free blocks are allocated first, so that the blocks in use are close together and can be read as one range.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError("a block pool needs at least one block of at least one token")
        self.total = blocks
        self.block_tokens = block_tokens
        self._is_free = bytearray(b"\x01") * blocks
        self._free = blocks
        self._lowest = 0  # no block below it is free
        self._held: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        return self._free

    @property
    def held(self) -> int:
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def holders(self) -> int:
        return len(self._held)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def blocks_of(self, owner: int) -> list[int]:
        return self._held.get(owner, [])

    def extend(self, owner: int, tokens: int) -> list[int]:
        """Allocate blocks until the owner can hold `tokens`; return all its blocks. Never frees any."""
        own_blocks = self._held.get(owner)
        held = 0 if own_blocks is None else len(own_blocks)
        need = self.blocks_for(tokens) - held
        if need > self._free:
            raise OutOfBlocks(f"{need} blocks needed, {self._free} free")
        if own_blocks is None:
            own_blocks = self._held[owner] = []
        if need > 0:
            own_blocks.extend(self._take(need))
        return own_blocks

    def release(self, owner: int) -> int:
        """Free all blocks of the owner; return their number."""
        blocks = self._held.pop(owner, [])
        for block in blocks:
            self._is_free[block] = 1
        self._lowest = min(self._lowest, *blocks, self.total)
        self._free += len(blocks)
        return len(blocks)

    def _take(self, count: int) -> list[int]:
        blocks_taken: list[int] = []
        at = self._lowest
        for _ in range(count):
            at = self._is_free.index(1, at)
            self._is_free[at] = 0
            blocks_taken.append(at)
        self._lowest = at
        self._free -= count
        return blocks_taken
