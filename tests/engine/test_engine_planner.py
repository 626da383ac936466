"""The step planner."""

from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.lanes import Lane
from inferry.engine.blocks import BlockPool
from inferry.engine.planner import Limits, StepPlan, plan_step
from inferry.engine.sequences import Sequence
from support.engine_fixtures import greedy

LIMITS = Limits(max_sequences=8, chunk_tokens=32, block_tokens=4, min_held_tokens=4)


def a_sequence(
    key: int,
    tokens: int,
    *,
    lane: Lane = Lane.P1,
    computed: int = 0,
    blocks: int | None = None,
    is_batch: bool | None = None,
) -> Sequence:
    """A sequence of P2 is batch work unless `is_batch` says otherwise."""
    batch = lane is Lane.P2 if is_batch is None else is_batch
    sequence = Sequence(key, [1] * tokens, sampling=greedy(), lane=lane, arrival=key, limit=10_000, is_batch=batch)
    sequence.computed = computed
    sequence.blocks = list(range(-(-computed // LIMITS.block_tokens) if blocks is None else blocks))
    return sequence


def decoding(key: int, tokens: int = 8, lane: Lane = Lane.P1) -> Sequence:
    return a_sequence(key, tokens, lane=lane, computed=tokens - 1, blocks=-(-tokens // LIMITS.block_tokens))


def work(plan: StepPlan) -> list[tuple[int, int]]:
    return [(piece.sequence.key, piece.tokens) for piece in plan.work]


def test_running_sequences_decode_before_prompts_are_computed() -> None:
    plan = plan_step([decoding(1), decoding(2)], [a_sequence(3, 10)], 100, LIMITS)
    assert work(plan) == [(1, 1), (2, 1), (3, 10)]


def test_a_prompt_longer_than_the_chunk_is_computed_in_pieces() -> None:
    plan = plan_step([a_sequence(1, 100, computed=32)], [], 100, LIMITS)
    assert work(plan) == [(1, 32)]


def test_the_chunk_goes_to_the_higher_lane_first() -> None:
    batch = a_sequence(1, 100, lane=Lane.P2, computed=32)
    plan = plan_step([batch], [a_sequence(2, 20, lane=Lane.P0)], 100, LIMITS, may_hold=False)
    assert work(plan) == [(2, 20), (1, 12)]


def test_a_live_prompt_shortens_its_step_by_holding_batch_work_back_once() -> None:
    batch = [decoding(key, lane=Lane.P2) for key in range(1, 6)]
    live = a_sequence(9, 20, lane=Lane.P0)
    plan = plan_step(batch, [live], 100, LIMITS, may_hold=True)
    assert (work(plan), plan.held_back) == ([(9, 20)], True)
    plan = plan_step(batch, [live], 100, LIMITS, may_hold=False)
    assert (len(plan.work), plan.held_back) == (6, False)


def test_a_lane_is_a_batch_lane_by_its_targets_and_not_by_its_number() -> None:
    batch = [a_sequence(key, 8, lane=Lane.P1, computed=7, is_batch=True) for key in range(1, 6)]
    live = a_sequence(9, 20, lane=Lane.P2, is_batch=False)
    plan = plan_step(batch, [live], 100, LIMITS)
    assert (work(plan), plan.held_back) == ([(9, 20)], True)


def test_live_decodes_are_never_held_back() -> None:
    plan = plan_step(
        [decoding(1, lane=Lane.P1), *(decoding(key, lane=Lane.P2) for key in range(2, 8))],
        [a_sequence(9, 5, lane=Lane.P0)],
        100,
        LIMITS,
    )
    assert work(plan) == [(1, 1), (9, 5)]


def test_when_blocks_run_out_the_lowest_ranked_sequence_is_preempted() -> None:
    first, second, batch = decoding(1), decoding(3), decoding(2, lane=Lane.P2)
    for sequence in (first, second, batch):
        sequence.tokens.append(1)  # one past a block boundary
        sequence.computed += 1
    plan = plan_step([first, second, batch], [], 0, LIMITS)
    assert plan.preempted == (batch,)
    assert work(plan) == [(1, 1), (3, 1)]


def test_no_sequence_is_admitted_in_a_step_that_preempts() -> None:
    grown = decoding(1)
    grown.tokens.append(1)
    grown.computed += 1
    plan = plan_step([grown, decoding(2)], [a_sequence(3, 1, lane=Lane.P0)], 0, LIMITS)
    assert (plan.preempted, plan.admitted) != ((), ())
    assert plan.admitted == ()


def test_a_small_prompt_does_not_slip_past_a_larger_one_that_waits() -> None:
    plan = plan_step([decoding(1)], [a_sequence(2, 40), a_sequence(3, 4)], 5, LIMITS)
    assert plan.admitted == ()


@given(st.data())
def test_every_plan_keeps_its_limits_and_computes_something(data: st.DataObject) -> None:
    lanes = st.sampled_from(list(Lane))
    total = data.draw(st.integers(8, 40), label="blocks")
    longest = total * LIMITS.block_tokens
    running: list[Sequence] = []
    free = total
    for key in range(data.draw(st.integers(0, LIMITS.max_sequences))):
        tokens = data.draw(st.integers(1, longest))
        computed = data.draw(st.integers(0, tokens - 1))
        # Between steps a sequence may lack the block of its newest token, and no more than that.
        blocks = -(-(tokens - data.draw(st.booleans())) // LIMITS.block_tokens)
        if blocks <= free and computed <= blocks * LIMITS.block_tokens:
            free -= blocks
            running.append(a_sequence(key, tokens, lane=data.draw(lanes), computed=computed, blocks=blocks))
    waiting = [
        a_sequence(100 + key, data.draw(st.integers(1, longest)), lane=data.draw(lanes))
        for key in range(data.draw(st.integers(0, 5)))
    ]
    running.sort(key=lambda s: s.rank)
    waiting.sort(key=lambda s: s.rank)
    may_hold = data.draw(st.booleans())
    plan = plan_step(running, waiting, free, LIMITS, may_hold=may_hold)

    assert bool(plan.work) == bool(running or waiting)
    keys = [piece.sequence.key for piece in plan.work]
    assert len(keys) == len(set(keys))
    assert all(1 <= piece.tokens <= piece.sequence.pending for piece in plan.work)
    prompts = sum(piece.tokens for piece in plan.work if piece.sequence.pending > 1)
    assert prompts <= LIMITS.chunk_tokens
    assert set(plan.preempted) <= set(running)
    assert not set(plan.preempted) & {piece.sequence for piece in plan.work}
    assert list(plan.preempted) == running[::-1][: len(plan.preempted)]
    assert list(plan.admitted) == [s for s in waiting if s in plan.admitted]
    assert len(running) - len(plan.preempted) + len(plan.admitted) <= LIMITS.max_sequences
    need = sum(
        -(-len(piece.sequence.tokens) // LIMITS.block_tokens) - len(piece.sequence.blocks) for piece in plan.work
    )
    assert need <= free + sum(len(sequence.blocks) for sequence in plan.preempted)
    if running and not plan.held_back:
        first = plan.work[0].sequence if plan.work[0].sequence.pending > 1 else running[0]
        assert first is running[0] or first.rank < running[0].rank
    assert plan_step(running, waiting, free, LIMITS, may_hold=may_hold) == plan


def test_a_preempted_sequence_frees_only_the_blocks_that_no_other_holds() -> None:
    pool = BlockPool(6, LIMITS.block_tokens)
    pool.extend(1, 12)
    pool.name(1, 0, [b"first", b"second"])
    for key in (2, 3, 4):
        pool.claim(key, pool.find([b"first", b"second"]))
        pool.extend(key, 12)
    running = [a_sequence(key, 13, computed=12) for key in (1, 2, 3, 4)]
    for sequence in running:
        sequence.blocks = pool.blocks_of(sequence.key)
    plan = plan_step(running, [], pool.free, LIMITS, shared=pool)
    assert [sequence.key for sequence in plan.preempted] == [4, 3]
    assert work(plan) == [(1, 1), (2, 1)]
