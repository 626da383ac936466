"""The engine model: conservation, the chunk, the cache, and steps taken together."""

import random
from collections.abc import Sequence

import pytest

from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.prompts import block_hashes
from inferry.sim.sequence import EngineSequence, FinishedEvent, FirstTokenEvent

COSTS = CostModel(
    base_s=0.005, prefill_token_s=20e-6, sequence_s=10e-6, kv_token_s=30e-9, attention_pair_s=1e-9, token_s=50e-6
)
PLAIN = CostModel(base_s=0.01, prefill_token_s=0.001, sequence_s=0.0, kv_token_s=0.0)


def drive(
    engine: Engine,
    arrivals: Sequence[tuple[float, EngineSequence]],
    aborts: Sequence[tuple[float, EngineSequence]] = (),
) -> None:
    """Play arrivals and aborts, checking after every step that no block is lost and no chunk too large."""
    todo = sorted(
        [(at, 0, i, s) for i, (at, s) in enumerate(arrivals)] + [(at, 1, i, s) for i, (at, s) in enumerate(aborts)]
    )
    while todo or engine.next_at is not None:
        if engine.next_at is None or (todo and todo[0][0] <= engine.next_at):
            at, kind, _, sequence = todo.pop(0)
            if kind == 0:
                engine.submit(sequence, at)
            else:
                engine.abort(sequence, at)
        else:
            engine.advance(engine.next_at)
            pool = engine.pool
            assert pool.held + pool.idle + pool.empty == pool.total
            assert min(pool.held, pool.idle, pool.empty, pool.anonymous) >= 0
            assert engine.chunk_tokens <= engine.flags.max_num_batched_tokens
            assert engine.running <= engine.flags.max_num_seqs


def a_crowd(seed: int, count: int = 60, *, itl_s: float | None = 0.03) -> list[tuple[float, EngineSequence]]:
    draw = random.Random(seed)
    crowd = []
    for number in range(count):
        shared, own = (1, 0, 64), (100 + number, 0, draw.randint(1, 300))
        prompt = 64 + own[2]
        crowd.append(
            (
                draw.uniform(0, 0.5),
                EngineSequence(
                    str(number),
                    prompt,
                    draw.randint(1, 80),
                    priority=draw.choice([-10, 0, 10]),
                    blocks=block_hashes((shared, own), 16),
                    itl_s=itl_s,
                ),
            )
        )
    return crowd


def test_a_lone_call_takes_its_prefill_and_one_step_per_further_token() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=4, max_num_batched_tokens=100))
    one = EngineSequence("a", 50, 11, itl_s=0.01)
    drive(engine, [(1.0, one)])
    assert one.first_at == pytest.approx(1.0 + 0.01 + 0.05)
    assert one.ended_at == pytest.approx(1.06 + 10 * 0.01)
    assert one.produced == 11
    assert one.late_s == pytest.approx(1.06)
    assert engine.busy_s == pytest.approx(0.16)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=4, max_num_batched_tokens=100))
    one = EngineSequence("a", 250, 1)
    drive(engine, [(0.0, one)])
    assert engine.steps == 3
    assert one.ended_at == pytest.approx(3 * 0.01 + 0.25)


def test_decoding_continues_during_prefill_with_higher_itl() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=4, max_num_batched_tokens=100))
    steady, bulky = EngineSequence("a", 10, 30, itl_s=0.01), EngineSequence("b", 99, 1)
    drive(engine, [(0.0, steady), (0.095, bulky)])
    assert steady.late_s == pytest.approx(0.02 + 0.099)
    assert bulky.first_at == pytest.approx(0.1 + 0.01 + 0.099)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_waiting_queue_is_in_order_of_the_policy(policy: str) -> None:
    flags = EngineFlags(
        max_num_seqs=1, max_num_batched_tokens=100, policy="priority" if policy == "priority" else "fcfs"
    )
    engine = Engine(PLAIN, flags)
    first, late, urgent = (
        EngineSequence("a", 10, 5),
        EngineSequence("b", 10, 5),
        EngineSequence("c", 10, 5, priority=-1),
    )
    drive(engine, [(0.0, first), (0.01, late), (0.02, urgent)])
    assert late.first_at is not None
    assert urgent.first_at is not None
    assert (urgent.first_at < late.first_at) == (policy == "priority")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_steps_taken_together_equal_steps_one_by_one(seed: int, policy: str) -> None:
    tight = 900 if seed % 2 else 100_000  # with preemption, and without
    flags = EngineFlags(
        max_num_seqs=24,
        max_num_batched_tokens=128,
        kv_tokens=tight,
        policy="priority" if policy == "priority" else "fcfs",
    )
    results = []
    for together in (True, False):
        crowd = a_crowd(seed)
        engine = Engine(COSTS, flags, fast_forward=together)
        draw = random.Random(seed)
        aborts = [(draw.uniform(0.2, 1.0), sequence) for _, sequence in crowd if draw.random() < 0.1]
        drive(engine, crowd, aborts)
        assert engine.pool.held == 0
        assert engine.running == engine.waiting == 0
        results.append((engine, [sequence for _, sequence in crowd]))
    (fast, ours), (slow, theirs) = results
    assert (fast.steps, fast.preemptions) == (slow.steps, slow.preemptions)
    assert fast.computed_tokens == slow.computed_tokens
    assert fast.busy_s == pytest.approx(slow.busy_s)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.produced, one.cached_tokens, one.preemptions) == (
            other.produced,
            other.cached_tokens,
            other.preemptions,
        )
        assert one.ended_at == pytest.approx(other.ended_at)
        if not one.aborted:
            # Work that passes the server is a flow over the steps taken together: alike up to a step's worth of it.
            assert one.late_s == pytest.approx(other.late_s, abs=0.003)
    if seed % 2:
        assert fast.preemptions > 0


def test_a_preempted_sequence_writes_every_token_once() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=2, max_num_batched_tokens=100, kv_tokens=160, prefix_caching=False))
    one, two = EngineSequence("a", 60, 60), EngineSequence("b", 60, 60)
    drive(engine, [(0.0, one), (0.0, two)])
    assert engine.preemptions > 0
    assert (one.produced, two.produced) == (60, 60)
    assert two.preemptions > 0
    assert one.preemptions == 0
    assert engine.computed_tokens > 60 + 60 + 59 + 59


def test_a_prefix_seen_before_is_not_computed_again() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=4, max_num_batched_tokens=4096))
    system = (1, 0, 160)
    first = EngineSequence("a", 200, 1, blocks=block_hashes((system, (2, 0, 40)), 16))
    again = EngineSequence("b", 200, 1, blocks=block_hashes((system, (3, 0, 40)), 16))
    stranger = EngineSequence("c", 200, 1, blocks=block_hashes((system, (2, 0, 40)), 16, salt=1))
    drive(engine, [(0.0, first), (10.0, again), (20.0, stranger)])
    assert (first.cached_tokens, again.cached_tokens, stranger.cached_tokens) == (0, 160, 0)
    assert (engine.pool.queried_tokens, engine.pool.hit_tokens) == (600, 160)
    assert engine.computed_tokens == 200 + 40 + 200


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=4, max_num_batched_tokens=4096))
    blocks = block_hashes(((1, 0, 160),), 16)
    first, again = EngineSequence("a", 160, 1, blocks=blocks), EngineSequence("b", 160, 1, blocks=blocks)
    drive(engine, [(0.0, first), (10.0, again)])
    assert again.cached_tokens == 144


def test_an_aborted_sequence_is_gone_with_the_end_of_the_step() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=4, max_num_batched_tokens=100))
    one = EngineSequence("a", 10, 1000)
    engine.submit(one, 0.0)
    assert engine.next_at == 0.0
    engine.advance(0.0)
    assert engine.next_at == pytest.approx(0.02)
    first = engine.advance(0.02)
    assert [type(events) for events in first] == [FirstTokenEvent]
    assert engine.abort(one, 0.055) is False
    assert engine.next_at == pytest.approx(0.06)
    ended = engine.advance(0.06)
    assert [type(events) for events in ended] == [FinishedEvent]
    assert (one.produced, engine.pool.held) == (5, 0)
    assert engine.running == 0


def test_a_waiting_sequence_is_aborted_at_once() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=1, max_num_batched_tokens=100))
    engine.submit(EngineSequence("a", 10, 5), 0.0)
    engine.advance(0.0)
    two = EngineSequence("b", 10, 5)
    engine.submit(two, 0.001)
    assert engine.abort(two, 0.002) is True
    assert engine.waiting == 0


def test_a_dead_engine_has_lost_everything() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=1, max_num_batched_tokens=100))
    one, two = EngineSequence("a", 10, 5), EngineSequence("b", 10, 5)
    engine.submit(one, 0.0)
    engine.submit(two, 0.0)
    engine.advance(0.0)
    assert engine.clear(0.01) == [one, two]
    assert (engine.running, engine.waiting, engine.pool.held, engine.next_at) == (0, 0, 0, None)


def test_what_can_never_fit_is_refused() -> None:
    engine = Engine(PLAIN, EngineFlags(max_num_seqs=1, max_num_batched_tokens=100, kv_tokens=64))
    with pytest.raises(ValueError, match="more KV"):
        engine.submit(EngineSequence("a", 60, 5), 0.0)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        EngineFlags(max_num_seqs=10, max_num_batched_tokens=5)
