"""Where KV blocks lie: how many decode steps could read one range, by how blocks are allocated, and what that costs.

The engine's own pool (`engine/blocks.py`) under random calls, without a model. Arms:

- `today`: the lowest empty block first; cached blocks are evicted by last use;
- `buckets of N`: a sequence takes runs of N neighbouring blocks, which are evicted together, the one that was used
  longest ago first. Blocks of a run that its sequence does not need are used by others only where no run is left;
- `open buckets of 64`: runs are filled by all sequences in turn and evicted together;
- `compaction`: as today, and when no sequence runs, cached blocks are moved together by their last use, so that those
  evicted next are neighbours.

A step reads a range where the CPU's runner does (`engine.runner.reads_range`); otherwise it copies the blocks that it
needs. Steps that are too small for that choice are not counted. Copies are counted in blocks, those of a compaction
too. Hits are prompt blocks found in the cache: buckets evict recently used blocks beside others. What a copy costs is
timed with the bundled model, on one core.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import mean
from typing import Any

import torch

from inferry.domain.sampling import Sampling
from inferry.engine.blocks import BlockPool
from inferry.engine.bundled import BUNDLED_DIRECTORY
from inferry.engine.config import EngineConfig
from inferry.engine.planner import Work
from inferry.engine.runner import MAX_FEW_BLOCKS, TorchRunner, reads_range
from inferry.engine.sequences import Sequence

BLOCK_TOKENS = 32
STEPS = 2_500
SEEDS = (1, 2, 3)
BUCKETS = (4, 8, 16)
OPEN_BUCKET = 64
POOL_BLOCKS = 2_048
STEPS_TIMED = ((32, 64, 64), (64, 30, 200), (64, 200, 600))
REPEATS = 40
TEMPLATE_BLOCKS = 8
MAX_CONTEXT_BLOCKS = 24
"""A run whose context has grown to this begins anew."""


class BucketPool(BlockPool):
    """Blocks are allocated and evicted in runs of `size` neighbours."""

    def __init__(self, blocks: int, block_tokens: int, size: int) -> None:
        super().__init__(blocks - blocks % size, block_tokens)
        self._size = size
        self._last: list[int] = []

    def extend(self, owner: int, tokens: int) -> list[int]:
        self._last = self.blocks_of(owner)[-1:]
        return super().extend(owner, tokens)

    def _take(self, count: int) -> list[int]:
        taken: list[int] = []
        before = self._last[0] if self._last else None
        for _ in range(count):
            at = self._next(before)
            self._is_empty[at] = 0
            self._empty -= 1
            self._holders[at] = self._is_held[at] = 1
            taken.append(at)
            before = at
        return taken

    def _next(self, before: int | None) -> int:
        """The neighbour of the block before, else the first block of an empty run, else any block."""
        if before is not None and (before + 1) % self._size and self._is_empty[before + 1]:
            return before + 1
        whole = bytes(b"\x01" * self._size)
        for start in range(0, self.total, self._size):
            if self._is_empty[start : start + self._size] == whole:
                return start
        runs = [
            (max((self._last_use[block] for block in cached), default=0), start)
            for start in range(0, self.total, self._size)
            if not any(self._is_held[start : start + self._size])
            and (cached := [block for block in range(start, start + self._size) if block in self._cached])
        ]
        if runs:
            start = min(runs)[1]
            for block in range(start, start + self._size):
                if block in self._cached:
                    self._cached.remove(block)
                    del self._by_key[self._key_of.pop(block)]
                    self._set_empty(block)
            return start
        if not self._empty:
            self._evict()
        return self._is_empty.index(1)


class OpenBucketPool(BlockPool):
    """One run of `size` neighbours is open for all sequences. When it is full, the next is opened: one of which at
    least half is not held, and was used longest ago.
    """

    def __init__(self, blocks: int, block_tokens: int, size: int) -> None:
        super().__init__(blocks, block_tokens)
        self._size = size
        self._open = 0

    def _take(self, count: int) -> list[int]:
        taken: list[int] = []
        for _ in range(count):
            at = self._is_empty.find(1, self._open, self._open + self._size)
            if at < 0 and not self._open_next():
                return taken + super()._take(count - len(taken))
            at = self._is_empty.index(1, self._open)
            self._is_empty[at] = 0
            self._empty -= 1
            self._holders[at] = self._is_held[at] = 1
            taken.append(at)
        return taken

    def _open_next(self) -> bool:
        runs = []
        for start in range(0, self.total, self._size):
            held = sum(self._is_held[start : start + self._size])
            if held <= self._size // 2:
                cached = [block for block in range(start, start + self._size) if block in self._cached]
                runs.append((max((self._last_use[block] for block in cached), default=0), start, cached))
        if not runs:
            return False
        _, self._open, cached = min(runs)
        for block in cached:
            self._cached.remove(block)
            del self._by_key[self._key_of.pop(block)]
            self._set_empty(block)
        return True


class CompactingPool(BlockPool):
    """Cached blocks can be moved together. `moved` counts the copies."""

    moved = 0

    def compact(self) -> None:
        """The blocks used last come first, so that those evicted first are neighbours at the end."""
        order = sorted(self._cached, key=lambda block: -self._last_use[block])
        uses = [self._last_use[block] for block in order]
        keys = [self._key_of[block] for block in order]
        self.moved += sum(place != block for place, block in enumerate(order))
        count = len(order)
        self._key_of = dict(enumerate(keys))
        self._by_key = {key: place for place, key in enumerate(keys)}
        self._cached = set(range(count))
        self._last_use = [*uses, *[0] * (self.total - count)]
        self._by_use = sorted(zip(uses, range(count), strict=True))
        self._is_empty = bytearray(count) + bytearray(b"\x01") * (self.total - count)
        self._lowest = count


class Call:
    """One running call: `known` are the names of its prompt's full blocks, `left` the tokens it will write."""

    def __init__(self, key: int, known: list[bytes], tokens: int, left: int, run: int | None) -> None:
        self.key, self.known, self.tokens, self.left, self.run = key, known, tokens, left, run


class Workload:
    """Random calls. `shared` names blocks that prompts begin with: a template's, or those of the run so far."""

    def __init__(
        self, blocks: int, sequences: int, prompt: tuple[int, int], output: tuple[int, int], *,
        templates: int = 0, runs: int = 0, burst: int | None = None,
    ) -> None:  # fmt: skip
        self.blocks, self.sequences, self.prompt, self.output = blocks, sequences, prompt, output
        self.templates, self.runs, self.burst = templates, runs, burst


WORKLOADS = {
    "short calls": Workload(2_048, 64, (30, 200), (16, 64)),
    "long calls": Workload(2_048, 64, (200, 600), (32, 256)),
    "long calls, a small pool": Workload(768, 32, (200, 600), (32, 256)),
    "eight templates": Workload(2_048, 64, (100, 300), (32, 128), templates=8),
    "runs with growing contexts": Workload(2_048, 48, (30, 200), (16, 64), runs=96),
    "bursts with drains": Workload(2_048, 64, (100, 400), (16, 128), burst=160),
}


class Play:
    """One workload on one pool. A step writes a token of every running call."""

    def __init__(self, workload: Workload, pool: BlockPool, seed: int) -> None:
        self.workload, self.pool, self.rng = workload, pool, random.Random(seed)
        self.running: list[Call] = []
        self.contexts: dict[int, list[bytes]] = {}
        self.idle = deque(range(workload.runs))
        self.calls = self.in_burst = 0
        self.prompt_blocks = self.hits = self.written = 0
        self.steps = self.ranges = self.copied = 0
        self.waiting = self._call()

    def run(self) -> dict[str, float]:
        for _ in range(STEPS):
            self._start_calls()
            self._read()
            self._write()
        steps = max(1, self.steps)
        return {
            "range_share": self.ranges / steps,
            "blocks_copied_per_step": self.copied / steps,
            "blocks_moved_per_step": (self.pool.moved if isinstance(self.pool, CompactingPool) else 0) / steps,
            "prompt_hit_share": self.hits / max(1, self.prompt_blocks),
            "tokens_per_step": self.written / STEPS,
        }

    def _call(self) -> Call:
        self.calls += 1
        run, known = None, list[bytes]()
        if self.workload.runs:
            run = self.idle.popleft()
            known = self.contexts.get(run, [])
        elif self.workload.templates:
            template = self.rng.randrange(self.workload.templates)
            known = [b"t%d-%d" % (template, block) for block in range(TEMPLATE_BLOCKS)]
        fresh = self.rng.randint(*self.workload.prompt)
        names = [*known, *(b"%d-%d" % (self.calls, block) for block in range(fresh // BLOCK_TOKENS))]
        tokens = len(known) * BLOCK_TOKENS + fresh
        return Call(self.calls, names, tokens, self.rng.randint(*self.workload.output), run)

    def _start_calls(self) -> None:
        burst, pool = self.workload.burst, self.pool
        if burst is not None and self.in_burst >= burst and not self.running:
            self.in_burst = 0
            if isinstance(pool, CompactingPool):
                pool.compact()
        while len(self.running) < self.workload.sequences and (burst is None or self.in_burst < burst):
            call = self.waiting
            found = pool.find(call.known[: (call.tokens - 1) // BLOCK_TOKENS])
            if pool.blocks_for(call.tokens) - pool.count_held(found) + len(self.running) > pool.free:
                break  # one spare block for each that runs, as in the engine's planners
            pool.claim(call.key, found)
            pool.extend(call.key, call.tokens)
            pool.name(call.key, len(found), call.known[len(found) :])
            self.prompt_blocks += len(call.known)
            self.hits += len(found)
            self.in_burst += 1
            self.running.append(call)
            self.waiting = self._call()

    def _read(self) -> None:
        blocks = [self.pool.extend(call.key, call.tokens + 1) for call in self.running]
        if max(map(len, blocks), default=0) * len(blocks) > MAX_FEW_BLOCKS:
            self.steps += 1
            listed = [block for own in blocks for block in own]
            if reads_range(listed):
                self.ranges += 1
            else:
                self.copied += len(listed)

    def _write(self) -> None:
        self.written += len(self.running)
        for call in self.running:
            call.tokens, call.left = call.tokens + 1, call.left - 1
            full = call.tokens // BLOCK_TOKENS
            if full > len(call.known):
                call.known = [*call.known, b"%d-out-%d" % (call.key, full)]
                self.pool.name(call.key, full - 1, call.known[full - 1 : full])
        for call in [one for one in self.running if not one.left]:
            self.running.remove(call)
            self.pool.release(call.key)
            if call.run is not None:
                self.contexts[call.run] = call.known if len(call.known) < MAX_CONTEXT_BLOCKS else []
                self.idle.append(call.run)


def step_times() -> dict[str, dict[str, float]]:
    """Milliseconds of decode steps of the bundled model on one core, and how much longer a step is that copies.

    Both read the same number of blocks: neighbours, or random ones of the pool. The best of alternating repeats.
    """
    config = EngineConfig(kv_tokens=POOL_BLOCKS * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
    torch.set_num_threads(1)
    runner, rng = TorchRunner.load(BUNDLED_DIRECTORY, config), random.Random(1)
    found: dict[str, dict[str, float]] = {}
    for sequences, low, high in STEPS_TIMED:
        lengths = [rng.randint(low, high) for _ in range(sequences)]
        needed = [-(-length // BLOCK_TOKENS) for length in lengths]
        orders = {"range": range(sum(needed)), "copy": rng.sample(range(POOL_BLOCKS), sum(needed))}
        best = dict.fromkeys(orders, math.inf)
        for _ in range(REPEATS):
            for arm, order in orders.items():
                work = _decodes(lengths, needed, iter(order))
                began = time.perf_counter()
                runner.execute(work)
                best[arm] = min(best[arm], 1000 * (time.perf_counter() - began))
        figures = {f"{arm}_ms": round(ms, 3) for arm, ms in best.items()}
        name = f"{sequences} sequences of {low} to {high} tokens"
        found[name] = {**figures, "ratio": round(best["copy"] / best["range"], 2)}
        print(f"{name}: {found[name]}", flush=True)
    return found


def _decodes(lengths: list[int], needed: list[int], blocks: Iterator[int]) -> list[Work]:
    work = []
    for key, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        sequence = Sequence(
            key, [7] * length, sampling=Sampling(temperature=0.0), lane=0, arrival=key, limit=length + 1
        )
        sequence.computed, sequence.blocks = length - 1, list(islice(blocks, count))
        work.append(Work(sequence, 1))
    return work


def measure() -> dict[str, Any]:
    arms: dict[str, Callable[[int], BlockPool]] = {
        "today": lambda blocks: BlockPool(blocks, BLOCK_TOKENS),
        "compaction": lambda blocks: CompactingPool(blocks, BLOCK_TOKENS),
    }
    for size in BUCKETS:
        arms[f"buckets of {size}"] = lambda blocks, size=size: BucketPool(blocks, BLOCK_TOKENS, size)  # type: ignore[misc]
    arms[f"open buckets of {OPEN_BUCKET}"] = lambda blocks: OpenBucketPool(blocks, BLOCK_TOKENS, OPEN_BUCKET)
    found: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        found[name] = {}
        for arm, make in arms.items():
            played = [Play(workload, make(workload.blocks), seed).run() for seed in SEEDS]
            figures = {key: round(mean(one[key] for one in played), 4) for key in played[0]}
            found[name][arm] = figures
            print(f"{name:28} {arm:18} " + "  ".join(f"{key} {value:g}" for key, value in figures.items()), flush=True)
    return {
        "block_tokens": BLOCK_TOKENS,
        "steps": STEPS,
        "seeds": SEEDS,
        "workloads": found,
        "step_times": step_times(),
    }
