"""The block pool and the prefix cache under random operations: nothing leaks, counts are exact, salts never mix."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.lanes import Lane
from inferry.engine.blocks import BlockPool, OutOfBlocks
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.prefix_keys import next_key, root_key
from support.engine_fixtures import FakeRunner, fake_output, greedy, note

SIZE = 4
SALTS = (None, "", "a", "b")


class PoolModel:
    """A pool beside what it must contain: for each block the salt and the tokens that its owner wrote there."""

    def __init__(self, blocks: int, rng: random.Random) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.rng = rng
        self.owners: dict[int, tuple[str | None, list[int]]] = {}
        self.named: dict[int, int] = {}
        self.content: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.keys = 0
        self.now = 0.0

    def add(self) -> None:
        """A sequence: claims what is found, then allocates the rest, or gives up if there is too little."""
        self.keys += 1
        salt = self.rng.choice(SALTS)
        # Few different tokens, so that prefixes are often equal, also under different salts.
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 24))]
        found = self.pool.find(self._keys(salt, tokens)[: (len(tokens) - 1) // SIZE])
        for index, block in enumerate(found):
            assert self.content[block] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        taken = self.pool.blocks_for(len(tokens)) - self.pool.count_held(found)
        free = self.pool.free
        self.pool.claim(self.keys, found)
        try:
            self.pool.extend(self.keys, len(tokens))
        except OutOfBlocks:
            assert taken > free
            self.pool.release(self.keys)
            return
        assert taken <= free
        assert self.pool.free == free - taken
        self.owners[self.keys] = (salt, tokens)
        self.named[self.keys] = len(found)
        self.compute(self.keys)

    def grow(self) -> None:
        if not self.owners:
            return
        owner = self.rng.choice(list(self.owners))
        salt, tokens = self.owners[owner]
        longer = [*tokens, *(self.rng.randrange(2) for _ in range(self.rng.randrange(6)))]
        before = (self.pool.free, list(self.pool.blocks_of(owner)))
        try:
            held = self.pool.extend(owner, len(longer))
        except OutOfBlocks:
            assert (self.pool.free, list(self.pool.blocks_of(owner))) == before
            return
        assert held[: len(before[1])] == before[1]
        self.owners[owner] = (salt, longer)
        self.compute(owner)

    def compute(self, owner: int) -> None:
        """Write the owner's new blocks, sometimes without naming them: a step that is not over yet."""
        salt, tokens = self.owners[owner]
        first, full = self.named[owner], len(tokens) // SIZE
        blocks = self.pool.blocks_of(owner)
        for index in range(first, len(blocks)):
            assert self.pool.holders_of(blocks[index]) == 1, "a block that is written is held once"
            self.content[blocks[index]] = (salt, tuple(tokens[: (index + 1) * SIZE]))
        if self.rng.random() < 0.8:
            self.pool.name(owner, first, self._keys(salt, tokens)[first:full])
            self.named[owner] = full

    def release(self) -> None:
        """An end, an abort and a preemption are the same to the pool."""
        if self.owners:
            owner = self.rng.choice(list(self.owners))
            gain = self.pool.count_freed(self.pool.blocks_of(owner), {})
            free = self.pool.free
            run = self.rng.choice((None, "r", "s"))
            self.now += self.rng.random()
            given = self.pool.release(owner, run, self.now + 10)
            assert given == self.pool.blocks_for(len(self.owners.pop(owner)[1]))
            assert self.pool.free == free + gain
            assert self.pool.release(owner) == 0

    def release_several(self) -> None:
        chosen = self.rng.sample(list(self.owners), min(3, len(self.owners)))
        free, released = self.pool.free, dict[int, int]()
        gain = sum(self.pool.count_freed(self.pool.blocks_of(owner), released) for owner in chosen)
        for owner in chosen:
            self.pool.release(owner)
            del self.owners[owner]
        assert self.pool.free == free + gain

    def end_run(self) -> None:
        """A run is over, or time passes: what is cached stays, and less of it is kept."""
        cached, kept = self.pool.cached, self.pool.kept
        if self.rng.random() < 0.5:
            self.pool.end_run(self.rng.choice(("r", "s", "unknown")))
        else:
            self.pool.expire(self.now)
        assert self.pool.cached == cached
        assert self.pool.kept <= kept

    def evict(self) -> None:
        """One sequence takes all that is free, so that everything cached is evicted."""
        self.keys += 1
        self.pool.extend(self.keys, self.pool.free * SIZE)
        assert (self.pool.free, self.pool.cached) == (0, 0)
        self.check({self.keys})
        self.pool.release(self.keys)

    def check(self, others: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        pool = self.pool
        holders = Counter(block for owner in {*self.owners, *others} for block in pool.blocks_of(owner))
        assert [pool.holders_of(block) for block in range(pool.total)] == [holders[b] for b in range(pool.total)]
        assert pool.held == len(holders)
        assert 0 <= pool.cached <= pool.free == pool.total - len(holders)
        assert 0 <= pool.kept <= min(pool.cached, pool.total // 2)
        for owner in self.owners:
            blocks = pool.blocks_of(owner)
            assert len(blocks) == len(set(blocks))

    @staticmethod
    def _keys(salt: str | None, tokens: list[int]) -> list[bytes]:
        key, keys = root_key(salt), []
        for at in range(0, len(tokens) - SIZE + 1, SIZE):
            key = next_key(key, tokens[at : at + SIZE])
            keys.append(key)
        return keys


def test_ten_thousand_operations_leak_nothing_and_mix_no_salts() -> None:
    rng = random.Random(17)
    model = PoolModel(40, rng)
    for _ in range(10_000):
        rng.choices(
            (model.add, model.grow, model.release, model.release_several, model.end_run, model.evict),
            weights=(8, 6, 4, 1, 1, 0.05),
        )[0]()
        model.check()
    for owner in list(model.owners):
        model.pool.release(owner)
    assert (model.pool.free, model.pool.holders, model.pool.held) == (40, 0, 0)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32))
def test_random_operations_on_small_pools_leak_nothing(blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    model = PoolModel(blocks, rng)
    for _ in range(60):
        rng.choice((model.add, model.add, model.grow, model.release, model.end_run, model.evict))()
        model.check()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([24, 48, 96]))
def test_sequences_with_common_prefixes_and_aborts_give_the_tokens_of_a_cold_engine(seed: int, kv_tokens: int) -> None:
    rng = random.Random(seed)
    config = EngineConfig(max_sequences=4, kv_tokens=kv_tokens, chunk_tokens=6, block_tokens=SIZE)
    core = EngineCore(FakeRunner(config), config)
    stems = [[rng.randrange(97) for _ in range(20)] for _ in range(2)]
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    ended: list[int] = []
    for key in range(16):
        prompts[key] = [*rng.choice(stems)[: rng.randrange(1, 20)], rng.randrange(97)]
        core.add(Request(key, prompts[key], greedy(rng.randint(1, 12)), Lane(rng.randrange(3)), rng.choice("ab")))
        for _ in range(rng.randrange(4)):
            step = core.step()
            note(step, outputs)
            ended += [end.account.key for end in step.ends]
        if rng.random() < 0.3:
            ended += [account.key for account in core.abort([rng.randrange(16)])]
    for _ in range(2_000):
        if not core.has_work:
            break
        step = core.step()
        note(step, outputs)
        ended += [end.account.key for end in step.ends]
    assert sorted(ended) == list(range(16))
    assert (core.pool.free, core.pool.holders) == (core.pool.total, 0)
    for key, output in outputs.items():
        assert output == fake_output(prompts[key], len(output))


def test_five_hundred_sequences_finish_in_a_pool_for_fifty() -> None:
    """Each one needs up to 10 blocks, so about 50 fit at once; a third share a prefix."""
    rng = random.Random(5)
    config = EngineConfig(max_sequences=500, kv_tokens=50 * 10 * SIZE, chunk_tokens=64, block_tokens=SIZE)
    core = EngineCore(FakeRunner(config), config)
    stem = [rng.randrange(97) for _ in range(12)]
    prompts = {
        key: [*(stem if key % 3 == 0 else []), *(rng.randrange(97) for _ in range(rng.randint(1, 16)))]
        for key in range(500)
    }
    for key, prompt in prompts.items():
        assert core.add(Request(key, prompt, greedy(40 - len(prompt)), Lane(key % 3), "ab"[key % 2])) is None
    outputs: dict[int, list[int]] = {}
    ends = 0
    for _ in range(20_000):
        if not core.has_work:
            break
        step = core.step()
        note(step, outputs)
        ends += len(step.ends)
    assert ends == 500
    assert core.stats().preemptions > 0
    assert (core.pool.free, core.pool.holders) == (core.pool.total, 0)
    assert outputs == {key: fake_output(prompt, 40 - len(prompt)) for key, prompt in prompts.items()}
