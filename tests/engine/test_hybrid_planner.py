"""The planner of the mode `hybrid`: when prompts are computed, and what that does to inter-token latencies."""

import pytest

from inferry.domain.lanes import Lane
from inferry.engine.hybrid_planner import QUIET_STEPS, HybridPlanner
from inferry.engine.planner import Limits, StepPlan
from inferry.engine.sequences import Sequence
from support.engine_fixtures import greedy
from support.modelled_runner import modelled

LIMITS = Limits(max_sequences=8, chunk_tokens=64, block_tokens=4, phase_tokens=128, mixed_tokens=16)
FULL = 8


def a_sequence(
    key: int, tokens: int, *, lane: Lane = Lane.P1, computed: int = 0, blocks: int | None = None
) -> Sequence:
    sequence = Sequence(key, [1] * tokens, sampling=greedy(), lane=lane, arrival=key, limit=10_000)
    sequence.computed = computed
    sequence.blocks = list(range(-(-(tokens if computed else 0) // LIMITS.block_tokens) if blocks is None else blocks))
    return sequence


def decoding(count: int, lane: Lane = Lane.P1) -> list[Sequence]:
    return [a_sequence(key, 8, lane=lane, computed=7) for key in range(count)]


def work(plan: StepPlan) -> list[tuple[int, int]]:
    return [(piece.sequence.key, piece.tokens) for piece in plan.work]


def planned(
    planner: HybridPlanner, running: list[Sequence], waiting: list[Sequence], free: int = 1_000
) -> tuple[StepPlan, HybridPlanner]:
    return planner.plan(running, waiting, free, LIMITS)


def test_a_group_takes_the_open_slots_and_prepares_the_next_sequences_but_for_their_last_tokens() -> None:
    plan, _ = planned(HybridPlanner(), [], [a_sequence(key, 6) for key in range(FULL + 3)])
    assert [sequence.key for sequence in plan.admitted] == list(range(FULL))
    assert work(plan) == [(key, 6 if key < FULL else 5) for key in range(FULL + 3)]


def test_a_phase_ends_at_its_limit_and_decodes_follow() -> None:
    waiting = [a_sequence(50 + key, 40) for key in range(6)]
    planner = HybridPlanner(phase_tokens=100, phase_limit=LIMITS.phase_tokens, seats=2)
    plan, planner = planned(planner, decoding(2), waiting)
    assert work(plan) == [(50, 28)]
    plan, planner = planned(planner, decoding(2), waiting)
    assert work(plan) == [(0, 1), (1, 1)]
    assert (planner.phase_tokens, planner.decode_steps) == (0, 1)


def test_while_prepared_sequences_take_the_free_slots_no_prompt_is_computed() -> None:
    prepared = [a_sequence(50 + key, 6, computed=5) for key in range(2)]
    waiting = [*prepared, a_sequence(90, 6)]
    plan, _ = planned(HybridPlanner(decode_steps=5 * QUIET_STEPS, seats=FULL), decoding(FULL - 2), waiting)
    assert plan.admitted == tuple(prepared)
    assert work(plan) == [(key, 1) for key in (*range(FULL - 2), 50, 51)]


@pytest.mark.parametrize(("decode_steps", "open_slots", "begins"), [(99, 1, False), (100, 1, True), (1, 2, True)])
def test_a_long_phase_waits_for_quiet_steps_or_for_an_eighth_of_the_slots(
    decode_steps: int, open_slots: int, begins: bool
) -> None:
    limits = Limits(max_sequences=16, chunk_tokens=64, block_tokens=4, phase_tokens=128, mixed_tokens=16)
    planner = HybridPlanner(decode_steps=decode_steps, seats=16 - open_slots, freed_per_step=0.01)
    plan, following = planner.plan(decoding(16 - open_slots), [a_sequence(50 + n, 10) for n in range(4)], 1_000, limits)
    assert (len(work(plan)) == 4) is begins
    assert following.phase_limit == (limits.phase_tokens if begins else 0)


def test_where_prepared_sequences_would_not_last_prompts_are_computed_beside_decodes() -> None:
    waiting = [a_sequence(50 + key, 10) for key in range(4)]
    planner = HybridPlanner(decode_steps=1, seats=FULL - 1, freed_per_step=0.05)
    plan, planner = planned(planner, decoding(FULL - 1), waiting)
    assert work(plan) == [*((key, 1) for key in range(FULL - 1)), (50, 10), (51, 6)]
    assert plan.admitted == (waiting[0],)
    assert (planner.phase_tokens, planner.decode_steps) == (0, 0)
    # The next slot has a prepared sequence soon: no other prompt joins these steps.
    waiting[1].computed, waiting[1].blocks = 6, [1, 2, 3]
    waiting[0].computed, waiting[0].blocks = 10, [4, 5, 6]
    plan, _ = planned(planner, [*decoding(FULL - 1), waiting[0]], waiting[1:])
    assert {piece.tokens for piece in plan.work} == {1}


@pytest.mark.parametrize(("running", "tokens"), [(FULL - 1, 16), (FULL - 3, 3 * 16), (2, 64)])
def test_more_prompt_tokens_are_computed_beside_decodes_the_more_slots_are_open(running: int, tokens: int) -> None:
    planner = HybridPlanner(decode_steps=1, seats=running)
    plan, _ = planned(planner, decoding(running), [a_sequence(50, 10_000)], free=10_000)
    assert work(plan) == [*((key, 1) for key in range(running)), (50, tokens)]


def test_a_prompt_of_a_higher_lane_is_prepared_at_once() -> None:
    planner = HybridPlanner(decode_steps=1, seats=FULL)
    plan, _ = planned(planner, decoding(FULL, Lane.P2), [a_sequence(50, 10, lane=Lane.P0)])
    assert work(plan) == [(50, 9)]
    plan, _ = planned(planner, decoding(FULL, Lane.P0), [a_sequence(50, 10, lane=Lane.P0)])
    assert len(plan.work) == FULL


def test_prepared_sequences_give_up_their_blocks_before_one_that_runs() -> None:
    grown = decoding(2)
    for sequence in grown:
        sequence.tokens.append(1)  # one past a block boundary
        sequence.computed += 1
    prepared = [a_sequence(50 + key, 6, computed=5) for key in range(2)]
    plan, _ = planned(HybridPlanner(decode_steps=1, seats=2), grown, prepared, free=0)
    assert plan.preempted == (prepared[1],)
    assert work(plan)[:2] == [(0, 1), (1, 1)]


def test_as_many_sequences_are_prepared_as_there_are_slots() -> None:
    plan, _ = planned(HybridPlanner(), [], [a_sequence(key, 2) for key in range(40)])
    assert len(plan.work) == 2 * FULL


def test_the_rate_of_ends_counts_those_before_a_prefill_step_too() -> None:
    planner = HybridPlanner(decode_steps=1, seats=FULL, freed_per_step=1.0)
    _, after_decode = planned(planner, decoding(FULL - 2), [])
    assert after_decode.freed_per_step == pytest.approx(1.01)
    in_a_phase = HybridPlanner(phase_tokens=4, phase_limit=64, seats=FULL, freed_per_step=1.0)
    _, after_prefill = planned(in_a_phase, decoding(FULL - 2), [a_sequence(50, 6)])
    assert after_prefill.freed_per_step == pytest.approx(1.02)


@pytest.mark.parametrize("concurrency", [32, 48, 96])
def test_on_an_h200_hybrid_has_shorter_inter_token_latencies_at_p99_than_continuous(concurrency: int) -> None:
    hybrid, continuous = (modelled(mode, jobs=600, concurrency=concurrency) for mode in ("hybrid", "continuous"))
    assert hybrid.percentile(0.99) < 0.5 * continuous.percentile(0.99)
    assert hybrid.tokens_per_s > 0.97 * continuous.tokens_per_s


def test_with_a_queue_streams_wait_for_prompts_in_fewer_than_one_percent_of_the_steps() -> None:
    hybrid, continuous = (modelled(mode, jobs=1_200, concurrency=128) for mode in ("hybrid", "continuous"))
    assert hybrid.percentile(0.99) < 1.1 * hybrid.percentile(0.5)
    assert hybrid.tokens_per_s > 0.95 * continuous.tokens_per_s


def test_on_an_h200_continuous_has_two_and_a_half_times_the_throughput_of_static() -> None:
    continuous, static = (modelled(mode, jobs=600, concurrency=600) for mode in ("continuous", "static"))
    assert continuous.tokens_per_s > 2.5 * static.tokens_per_s
