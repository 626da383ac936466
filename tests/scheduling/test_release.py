"""A job is held back no longer than a multiple of what it would wait in the engine alone."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.domain.workers import DirectWaits, Phase, WorkerView
from inferry.scheduling.hold_bound import HOLD_FACTOR, TURN_FACTOR
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import end, first_token, offer, sent
from support.builders import a_job, a_policy, a_view

CHUNK = 2_048
WAIT_S = 1.0


def a_worker(waits_s: Sequence[float] = (WAIT_S,) * 3, *, sequences: int | None = None) -> WorkerView:
    """Its prefill rate is so low that paced jobs never go."""
    view = a_view("w", prefill_tokens_per_s=1e-6, sequences=sequences)
    return replace(view, capacity=replace(view.capacity, direct=DirectWaits(tuple(waits_s), 0.0, CHUNK)))


def held_back(view: WorkerView) -> Scheduler:
    """P0 decodes, so that lower lanes are paced, and the bucket is empty."""
    lanes = dict.fromkeys((Lane.P0, Lane.P1), a_policy(ttft_ms=1e9, itl_ms=1e9)) | {Lane.P2: a_policy()}
    scheduler = Scheduler(lanes, burst_tokens=1)
    scheduler.observe(view, 0.0)
    offer(scheduler, a_job("live", tokens=10, lane=Lane.P0))
    scheduler.tick(0.0)
    first_token(scheduler, "live")
    offer(scheduler, a_job("first", tokens=10, lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == ["first"]
    first_token(scheduler, "first")
    return scheduler


def test_a_paced_job_goes_once_it_has_waited_longer_than_in_the_engine_alone() -> None:
    scheduler = held_back(a_worker())
    offer(scheduler, a_job("p2", tokens=500, lane=Lane.P2))
    tick = scheduler.tick(0.0)
    assert sent(tick) == []
    assert tick.wake_at == pytest.approx(HOLD_FACTOR * WAIT_S)
    assert sent(scheduler.tick(HOLD_FACTOR * WAIT_S - 0.01)) == []
    assert sent(scheduler.tick(HOLD_FACTOR * WAIT_S)) == ["p2"]


def test_without_a_model_of_the_engine_a_job_is_held_as_before() -> None:
    scheduler = held_back(a_view("w", prefill_tokens_per_s=1e-6))
    offer(scheduler, a_job("p2", tokens=500, lane=Lane.P2))
    scheduler.tick(0.0)
    assert sent(scheduler.tick(1_000.0)) == []


def test_the_slot_of_an_overdue_job_goes_to_a_higher_lane_that_waits() -> None:
    scheduler = held_back(a_worker((WAIT_S, 100.0, WAIT_S)))
    offer(scheduler, a_job("p2", tokens=CHUNK, lane=Lane.P2))
    scheduler.tick(0.0)
    offer(scheduler, a_job("p1", tokens=CHUNK, lane=Lane.P1), now=1.0)
    assert sent(scheduler.tick(HOLD_FACTOR * WAIT_S)) == ["p1"]
    first_token(scheduler, "p1", now=1.3)
    assert sent(scheduler.tick(1.3)) == ["p2"]


def test_a_job_that_is_far_overdue_goes_before_higher_lanes() -> None:
    scheduler = held_back(a_worker((WAIT_S, 100.0, WAIT_S)))
    offer(scheduler, a_job("p2", tokens=CHUNK, lane=Lane.P2))
    offer(scheduler, a_job("p1", tokens=CHUNK, lane=Lane.P1))
    scheduler.tick(0.0)
    assert sent(scheduler.tick(TURN_FACTOR * WAIT_S)) == ["p2"]


def test_overdue_jobs_keep_the_engine_busy_and_no_more() -> None:
    scheduler = held_back(a_worker())
    offer(scheduler, *(a_job(f"{n}", tokens=CHUNK // 2, lane=Lane.P2) for n in range(5)))
    scheduler.tick(0.0)
    assert sent(scheduler.tick(10.0)) == ["0", "1"]
    assert sent(scheduler.tick(10.0)) == []
    first_token(scheduler, "0", now=10.1)
    assert sent(scheduler.tick(10.1)) == ["2"]


def test_an_overdue_job_waits_while_the_engine_cannot_hold_it() -> None:
    scheduler = held_back(a_worker(sequences=2))
    offer(scheduler, a_job("p2", tokens=500, lane=Lane.P2))
    scheduler.tick(0.0)
    assert sent(scheduler.tick(10.0)) == []
    end(scheduler, "first", now=11.0)
    assert sent(scheduler.tick(11.0)) == ["p2"]


def test_the_oldest_job_of_a_queue_goes_first_whatever_the_fair_order_is() -> None:
    scheduler = held_back(a_worker())
    served = a_job("old", tokens=CHUNK, lane=Lane.P2, tenant="served")
    offer(scheduler, a_job("more", tokens=10, lane=Lane.P2, tenant="served"))
    offer(scheduler, served, a_job("new", tokens=CHUNK, lane=Lane.P2, tenant="new"))
    assert sent(scheduler.tick(10.0)) == ["more", "old"]


def test_a_prompt_of_its_own_length_shortens_the_hold() -> None:
    view = a_worker((0.0, 0.0, WAIT_S))
    direct = view.capacity.direct
    assert direct is not None
    view = replace(view, capacity=replace(view.capacity, direct=replace(direct, prompt_token_s=0.001)))
    scheduler = held_back(view)
    offer(scheduler, a_job("p2", tokens=1_000, lane=Lane.P2))
    # The engine alone would have its first token after two seconds, one of which is its own prompt.
    assert scheduler.tick(0.0).wake_at == pytest.approx(2.0 * HOLD_FACTOR - 1.0)


@settings(max_examples=40, deadline=None)
@given(
    wait_s=st.floats(0.1, 5.0),
    prompt_tokens=st.integers(10, 4_000),
    token_s=st.sampled_from([0.0, 1e-4, 1e-3]),
    higher_wait=st.booleans(),
)
def test_the_first_token_of_a_held_job_is_never_twice_as_late_as_in_the_engine_alone(
    wait_s: float, prompt_tokens: int, token_s: float, higher_wait: bool
) -> None:
    """Even while jobs of a higher lane wait all the time, and with the job's own prompt."""
    view = a_worker((wait_s, 1_000.0, wait_s))
    direct = DirectWaits((wait_s, 1_000.0, wait_s), token_s, CHUNK)
    scheduler = held_back(replace(view, capacity=replace(view.capacity, direct=direct)))
    offer(scheduler, a_job("p2", tokens=prompt_tokens, lane=Lane.P2))
    alone_s = prompt_tokens * token_s
    step_s = (wait_s + alone_s) / 16
    for number in range(100):
        now = number * step_s
        if higher_wait:
            offer(scheduler, a_job(f"p1-{number}", tokens=CHUNK, lane=Lane.P1), now=now)
        gone = sent(scheduler.tick(now))
        if "p2" in gone:
            break
        first_token(scheduler, *gone, now=now)
    assert now + alone_s < 2.0 * (wait_s + alone_s)


@pytest.mark.parametrize(("phase", "goes"), [(Phase.READY, True), (Phase.STARTING, True), (Phase.DOWN, False)])
def test_while_another_worker_is_down_paced_jobs_wait_for_the_rate(phase: Phase, goes: bool) -> None:
    scheduler = held_back(a_worker())
    scheduler.observe(replace(a_worker(sequences=0), worker="z", phase=phase), 0.0)
    offer(scheduler, a_job("p2", tokens=500, lane=Lane.P2))
    scheduler.tick(0.0)
    assert (sent(scheduler.tick(10 * HOLD_FACTOR * WAIT_S)) == ["p2"]) is goes
