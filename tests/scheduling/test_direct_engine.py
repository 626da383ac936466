"""The model of the engine alone: how long jobs would wait if every call went there at once."""

import pytest

from inferry.scheduling.capacity.direct_engine import MAX_WAITING, RECENT_JOBS, DirectEngine
from inferry.scheduling.capacity.step_costs import StepCostModel

CHUNK = 1_000
P0, P1, P2 = 0, 1, 2


def an_engine(*, sequences: int | None = None, kv_tokens: int | None = None) -> DirectEngine:
    """A step takes 10 ms and 1 ms for each decode, a prompt token 0.1 ms: 110 ms with a full chunk."""
    costs = StepCostModel()
    costs.base_s, costs.token_s, costs.prompt_s = 0.010, 0.001, 0.0001
    engine = DirectEngine(3, costs)
    engine.limit(sequences, kv_tokens, CHUNK)
    return engine


def arrive(engine: DirectEngine, lane: int, tokens: int = CHUNK, output: int = 1, at: float = 0.0) -> None:
    engine.arrived(lane, float(tokens), tokens, output, at)


def test_a_job_that_finds_the_engine_idle_does_not_wait() -> None:
    engine = an_engine()
    arrive(engine, P1)
    engine.advance(10.0)
    assert engine.wait_s(P1, 10.0) == pytest.approx(0.0, abs=1e-9)


def test_the_weight_of_a_prompt_is_positive_where_more_tokens_are_computed_than_it_has() -> None:
    engine = an_engine()
    engine.arrived(P1, 1_000_000.0, 10_000, 1, 0.0)
    engine.arrived(P1, 1_000.0, 1_000, 1, 0.0)
    assert all(job.weight > 0 for job in engine._waiting[P1])
    assert all(job.alone_s > 0 for job in engine._waiting[P1])


def test_a_job_waits_for_the_prompts_before_it() -> None:
    engine = an_engine()
    for _ in range(3):
        arrive(engine, P1, 900)
    engine.advance(10.0)
    # Two steps of 100 ms, and the rest of a chunk.
    assert engine.wait_s(P1, 10.0) == pytest.approx(0.2, abs=0.03)


def test_higher_lanes_go_first_but_a_prompt_that_was_begun_goes_on() -> None:
    engine = an_engine()
    arrive(engine, P2, 3 * CHUNK)
    arrive(engine, P2, 900)
    arrive(engine, P0, 900, at=0.05)
    engine.advance(10.0)
    assert engine.wait_s(P0, 10.0) == pytest.approx(0.33 - 0.05, abs=0.03)
    assert engine.wait_s(P2, 10.0) == pytest.approx(0.43, abs=0.03)


def test_jobs_in_the_queue_count_with_the_wait_that_they_will_have() -> None:
    engine = an_engine()
    for _ in range(11):
        arrive(engine, P2)
    assert engine.wait_s(P2, 0.0) == pytest.approx(1.1, abs=0.15)
    arrive(engine, P0, 5 * CHUNK)
    assert engine.wait_s(P2, 0.0) == pytest.approx(1.65, abs=0.15)


@pytest.mark.parametrize("limits", [{"sequences": 1}, {"kv_tokens": CHUNK + 100}])
def test_a_full_engine_admits_a_job_when_another_ends(limits: dict[str, int]) -> None:
    engine = an_engine(**limits)
    arrive(engine, P1, output=100)
    arrive(engine, P1, output=100)
    engine.advance(10.0)
    # One prompt, and 100 steps of 11 ms.
    assert engine.wait_s(P1, 10.0) == pytest.approx(0.11 + 1.1, abs=0.03)


def test_a_long_context_makes_a_prompt_token_cost_more() -> None:
    def wait_after(prompt_tokens: int) -> float:
        engine = an_engine()
        arrive(engine, P1)  # the mean of what came before
        engine.advance(10.0)
        engine.arrived(P1, float(CHUNK), prompt_tokens, 1, 10.0)
        arrive(engine, P1, at=10.0)
        engine.advance(20.0)
        return engine.wait_s(P1, 20.0)

    assert wait_after(50_000) > 1.2 * wait_after(CHUNK)


def test_decode_steps_are_skipped_without_a_change_of_the_waits() -> None:
    engine = an_engine()
    arrive(engine, P1, 10, output=1_000_000)
    engine.advance(5_000.0)
    arrive(engine, P1, at=5_000.0)
    arrive(engine, P1, at=5_000.0)
    engine.advance(5_010.0)
    assert engine.wait_s(P1, 5_010.0) == pytest.approx(0.12, abs=0.02)


def test_arrivals_before_the_first_costs_wait_for_them() -> None:
    costs = StepCostModel()
    engine = DirectEngine(3, costs)
    engine.limit(None, None, CHUNK)
    arrive(engine, P1)
    engine.advance(1.0)
    costs.base_s, costs.token_s, costs.prompt_s = 0.010, 0.001, 0.0001
    engine.advance(1.0)
    engine.advance(2.0)
    assert engine.wait_s(P1, 2.0) == pytest.approx(1.11, abs=0.12)


def test_old_waits_are_forgotten_and_a_cleared_engine_is_idle() -> None:
    engine = an_engine()
    for _ in range(20):
        arrive(engine, P1)
    engine.clear()
    assert engine.wait_s(P1, 0.0) == 0.0
    arrive(engine, P1)
    arrive(engine, P1)
    for number in range(1, RECENT_JOBS + 1):
        arrive(engine, P1, at=float(number))
    engine.advance(1_000.0)
    assert engine.wait_s(P1, 1_000.0) == pytest.approx(0.0, abs=0.01)


def test_a_model_that_falls_behind_without_bound_starts_afresh() -> None:
    engine = an_engine()
    for _ in range(MAX_WAITING + 10):
        arrive(engine, P2)
    assert engine.wait_s(P2, 0.0) < 0.11 * 20
