"""The planners of all modes under random work: plans fit, no sequence starves, and each ends and is planned no more."""

import random
from bisect import insort

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.lanes import Lane
from inferry.engine.hybrid_planner import QUIET_STEPS, HybridPlanner
from inferry.engine.padded_planner import PaddedPlanner
from inferry.engine.planner import NO_PADDING, ContinuousPlanner, Limits, Planner
from inferry.engine.sequences import Sequence
from support.engine_fixtures import greedy

BLOCK_TOKENS = 4
PLANNERS: dict[str, Planner] = {
    "continuous": ContinuousPlanner(),
    "hybrid": HybridPlanner(),
    "dynamic": PaddedPlanner(refills=True),
    "static": PaddedPlanner(refills=False),
}


class World:
    """An engine without a model: it applies plans as the core does and objects to those that break a rule."""

    def __init__(self, planner: Planner, limits: Limits, blocks: int, rng: random.Random) -> None:
        self.planner = planner
        self.limits = limits
        self.blocks = blocks
        self.rng = rng
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.ended: list[int] = []
        self.count = 0

    @property
    def held(self) -> int:
        return sum(len(sequence.blocks) for sequence in (*self.running, *self.waiting))

    def add(self, lane: Lane, tokens: int, output: int) -> None:
        self.count += 1
        sequence = Sequence(
            self.count, [1] * tokens, sampling=greedy(), lane=lane, arrival=self.count, limit=tokens + output,
            is_batch=lane is Lane.P2, batch=self.rng.randrange(2),
            kv_quotas=(("tenant", self.rng.choice((12, 40))),) if self.rng.random() < 0.2 else (),
        )  # fmt: skip
        insort(self.waiting, sequence, key=lambda one: one.rank)

    def abort(self) -> None:
        aborted = self.rng.choice([*self.running, *self.waiting])
        (self.running if aborted in self.running else self.waiting).remove(aborted)
        self.ended.append(aborted.key)

    def step(self) -> None:
        known = {*self.running, *self.waiting}
        plan, self.planner = self.planner.plan(self.running, self.waiting, self.blocks - self.held, self.limits)
        assert plan.work or plan.padding != NO_PADDING, "a step computes something"
        planned = [piece.sequence for piece in plan.work]
        assert len(set(planned)) == len(planned)
        assert {*planned, *plan.admitted, *plan.preempted} <= known, "an ended sequence was planned"
        assert not set(planned) & set(plan.preempted)
        prompts = sum(piece.tokens for piece in plan.work if piece.tokens > 1)
        assert prompts + sum(plan.padding.prompts) <= self.limits.chunk_tokens
        for sequence in plan.preempted:
            if sequence in self.running:
                self.running.remove(sequence)
                insort(self.waiting, sequence, key=lambda one: one.rank)
            sequence.blocks, sequence.computed = [], 0
        for sequence in plan.admitted:
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda one: one.rank)
        assert len(self.running) + plan.padding.rows <= self.limits.max_sequences
        for piece in plan.work:
            sequence = piece.sequence
            sequence.blocks = [0] * -(-len(sequence.tokens) // BLOCK_TOKENS)
            assert 1 <= piece.tokens <= sequence.pending
            sequence.computed += piece.tokens
            if not sequence.pending:
                assert sequence in self.running, "a sequence without a slot decoded"
                sequence.tokens.append(1)
                if len(sequence.tokens) >= sequence.limit:
                    self.running.remove(sequence)
                    self.ended.append(sequence.key)
        assert self.held <= self.blocks, "a plan needs more blocks than there are"


def a_world(mode: str, rng: random.Random) -> World:
    limits = Limits(
        max_sequences=rng.randint(1, 5), chunk_tokens=rng.choice((3, 16, 64)), block_tokens=BLOCK_TOKENS,
        min_held_tokens=2, phase_tokens=rng.choice((8, 128)), mixed_tokens=rng.choice((4, 16)),
    )  # fmt: skip
    return World(PLANNERS[mode], limits, rng.choice((12, 20, 200)), rng)


def a_size(rng: random.Random) -> tuple[int, int]:
    """Prompt and output tokens: the longest fits alone."""
    return rng.randint(1, 24), rng.randint(1, 20)


@pytest.mark.parametrize("mode", PLANNERS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_plans_fit_and_every_sequence_ends_in_every_mode(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    world = a_world(mode, rng)
    for _ in range(12):
        world.add(rng.choice(list(Lane)), *a_size(rng))
        for _ in range(rng.randint(0, 6)):
            if world.running or world.waiting:
                world.step()
        if (world.running or world.waiting) and rng.random() < 0.1:
            world.abort()
    for _ in range(12 * (QUIET_STEPS + 100)):
        if world.running or world.waiting:
            world.step()
    assert sorted(world.ended) == list(range(1, 13))


@pytest.mark.parametrize("mode", PLANNERS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_sequence_starves_while_later_ones_of_its_lane_keep_arriving(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    world = a_world(mode, rng)
    for _ in range(6):
        world.add(Lane.P1, *a_size(rng))
    for _ in range(6 * (QUIET_STEPS + 100)):
        while len(world.waiting) < 8:
            world.add(Lane.P1, *a_size(rng))
        world.step()
        if {1, 2, 3, 4, 5, 6} <= set(world.ended):
            return
    raise AssertionError("one of the first six has not ended")
