"""Prompt tokens per second while live sequences decode."""

import pytest

from inferry.domain.lanes import Lane
from inferry.scheduling.capacity.prefill_bucket import MAX_PACED_DEBT_S
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import end, first_token, offer, sent
from support.builders import a_job, a_policy, a_view


def paced(rate: float | None = 1_000.0, burst: int = 500, reserve: float = 0.0) -> Scheduler:
    lanes = dict.fromkeys((Lane.P0, Lane.P1), a_policy(ttft_ms=1e9, itl_ms=1e9)) | {Lane.P2: a_policy(reserve=reserve)}
    scheduler = Scheduler(lanes, burst_tokens=burst)
    scheduler.observe(a_view("w", prefill_tokens_per_s=rate), 0.0)
    return scheduler


def decoding(scheduler: Scheduler, lane: Lane = Lane.P0) -> Scheduler:
    """With one sequence that writes."""
    offer(scheduler, a_job("live", tokens=10, lane=lane))
    assert sent(scheduler.tick(0.0)) == ["live"]
    first_token(scheduler, "live")
    return scheduler


def test_prompts_are_sent_no_faster_than_the_rate_while_a_live_sequence_decodes() -> None:
    scheduler = decoding(paced())
    offer(scheduler, *(a_job(f"{n}", tokens=250) for n in range(6)))
    assert sent(scheduler.tick(0.0)) == ["0", "1"]
    tick = scheduler.tick(0.1)
    assert sent(tick) == []
    assert tick.wake_at is not None
    assert tick.wake_at == pytest.approx(0.25)
    tick = scheduler.tick(tick.wake_at)
    assert sent(tick) == ["2"]
    assert tick.wake_at == pytest.approx(0.5)


def test_the_bucket_holds_one_burst_however_long_it_was_quiet() -> None:
    scheduler = decoding(paced())
    offer(scheduler, *(a_job(f"{n}", tokens=250) for n in range(6)), now=100.0)
    assert sent(scheduler.tick(100.0)) == ["0", "1"]


def test_a_prompt_larger_than_the_burst_goes_when_the_bucket_is_full_and_leaves_a_debt() -> None:
    scheduler = decoding(paced())
    offer(scheduler, a_job("large", tokens=1_400), a_job("next", tokens=100))
    assert sent(scheduler.tick(0.0)) == ["large"]
    assert scheduler.tick(0.0).wake_at == pytest.approx(1.0)
    assert sent(scheduler.tick(0.99)) == []
    assert sent(scheduler.tick(1.0)) == ["next"]


def test_the_debt_of_a_long_prompt_is_bounded_so_that_short_ones_do_not_wait_for_all_of_it() -> None:
    scheduler = decoding(paced())
    offer(scheduler, a_job("long", tokens=20_000), a_job("next", tokens=100))
    assert sent(scheduler.tick(0.0)) == ["long"]
    assert scheduler.tick(0.0).wake_at == pytest.approx(MAX_PACED_DEBT_S + 0.1)
    assert sent(scheduler.tick(MAX_PACED_DEBT_S + 0.09)) == []
    assert sent(scheduler.tick(MAX_PACED_DEBT_S + 0.1)) == ["next"]


@pytest.mark.parametrize(
    ("decodes", "comes", "waits"),
    [
        (Lane.P0, Lane.P0, False),
        (Lane.P0, Lane.P1, True),
        (Lane.P0, Lane.P2, True),
        (Lane.P1, Lane.P0, False),
        (Lane.P1, Lane.P1, False),
        (Lane.P1, Lane.P2, True),
        (Lane.P2, Lane.P1, False),
        (Lane.P2, Lane.P2, False),
    ],
)
def test_the_rate_binds_lanes_below_the_best_that_decodes(decodes: Lane, comes: Lane, waits: bool) -> None:
    scheduler = decoding(paced(), decodes)
    offer(scheduler, *(a_job(f"{n}", tokens=250, lane=comes) for n in range(6)))
    assert len(sent(scheduler.tick(0.0))) == (2 if waits else 6)


def test_when_the_best_lane_has_stopped_decoding_the_next_one_is_protected() -> None:
    scheduler = decoding(paced(), Lane.P0)
    offer(scheduler, a_job("p1", tokens=10))
    scheduler.tick(0.0)
    first_token(scheduler, "p1")
    end(scheduler, "live")
    offer(scheduler, *(a_job(f"p1-{n}", tokens=250) for n in range(3)))
    offer(scheduler, *(a_job(f"p2-{n}", tokens=250, lane=Lane.P2) for n in range(3)))
    assert sent(scheduler.tick(0.0)) == ["p1-0", "p1-1", "p1-2"]


def test_unpaced_prompts_spend_tokens_with_bounded_debt() -> None:
    scheduler = decoding(paced())
    offer(scheduler, *(a_job(f"live-{n}", tokens=250, lane=Lane.P0) for n in range(40)))
    offer(scheduler, a_job("low", tokens=100, lane=Lane.P2))
    tick = scheduler.tick(0.0)
    assert len(sent(tick)) == 40
    assert tick.wake_at == pytest.approx(0.35)
    assert tick.wake_at is not None
    assert sent(scheduler.tick(tick.wake_at)) == ["low"]


def test_a_better_lane_goes_past_one_that_waits_for_the_rate() -> None:
    scheduler = decoding(paced())
    offer(scheduler, *(a_job(f"low-{n}", tokens=250, lane=Lane.P2) for n in range(4)))
    assert sent(scheduler.tick(0.0)) == ["low-0", "low-1"]
    offer(scheduler, a_job("high", tokens=250, lane=Lane.P0))
    assert sent(scheduler.tick(0.0)) == ["high"]


def test_an_owed_job_limited_by_the_rate_reserves_the_worker_from_paced_lanes_only() -> None:
    live = a_policy(ttft_ms=1e9, itl_ms=1e9)
    lanes = {Lane.P0: live, Lane.P1: live, Lane.P2: a_policy(share=0.5)}
    scheduler = Scheduler(lanes, burst_tokens=500)
    scheduler.observe(a_view("w", sequences=4, prefill_tokens_per_s=1_000.0), 0.0)
    decoding(scheduler)
    offer(scheduler, a_job("spends", tokens=500, lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == ["spends"]
    offer(scheduler, a_job("first", tokens=400, lane=Lane.P0), a_job("second", tokens=400, lane=Lane.P0))
    offer(scheduler, a_job("third", tokens=400, lane=Lane.P0))
    offer(scheduler, a_job("paced", tokens=1, lane=Lane.P1), a_job("owed", tokens=300, lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == ["first", "second"]
    end(scheduler, "first")
    # The turn of P2 lacks nothing but pace, and that is nothing to a live job; P1 would spend what it waits for.
    assert sent(scheduler.tick(0.001)) == ["third"]
    end(scheduler, "second")
    assert sent(scheduler.tick(0.002)) == []
    tick = scheduler.tick(0.002)
    while not tick.plans:
        assert tick.wake_at is not None
        tick = scheduler.tick(tick.wake_at)
    assert sent(tick) == ["owed"]


def test_the_rate_binds_no_more_when_the_last_live_sequence_has_ended() -> None:
    scheduler = decoding(paced())
    offer(scheduler, *(a_job(f"{n}", tokens=250) for n in range(6)))
    scheduler.tick(0.0)
    end(scheduler, "live")
    tick = scheduler.tick(0.0)
    assert (len(sent(tick)), tick.wake_at) == (4, None)


def test_without_a_rate_nothing_binds() -> None:
    scheduler = decoding(paced(rate=None))
    offer(scheduler, *(a_job(f"{n}", tokens=250) for n in range(6)))
    assert len(sent(scheduler.tick(0.0))) == 6


def test_lower_lanes_leave_part_of_the_bucket_to_higher_lanes() -> None:
    scheduler = decoding(paced(reserve=0.5))
    offer(scheduler, *(a_job(f"low-{n}", tokens=250, lane=Lane.P2) for n in range(3)))
    assert sent(scheduler.tick(0.0)) == ["low-0"]
    offer(scheduler, a_job("high", tokens=250, lane=Lane.P0))
    assert sent(scheduler.tick(0.0)) == ["high"]
    assert sent(scheduler.tick(0.25)) == []
    assert sent(scheduler.tick(0.5)) == ["low-1"]


def test_a_new_rate_holds_from_now_on() -> None:
    scheduler = decoding(paced(rate=100.0))
    offer(scheduler, *(a_job(f"{n}", tokens=500) for n in range(2)))
    assert scheduler.tick(0.0).wake_at == pytest.approx(5.0)
    scheduler.observe(a_view("w", prefill_tokens_per_s=1_000.0), 0.0)
    assert scheduler.tick(0.0).wake_at == pytest.approx(0.5)


def test_a_rate_of_zero_admits_no_job_and_sets_no_timer() -> None:
    scheduler = decoding(paced(rate=0.0, burst=100))
    offer(scheduler, a_job("1", tokens=100), a_job("2", tokens=100))
    tick = scheduler.tick(0.0)
    assert (sent(tick), tick.wake_at) == (["1"], None)


def test_nothing_is_spent_while_nothing_live_decodes() -> None:
    scheduler = decoding(paced(), Lane.P2)
    offer(scheduler, a_job("p1", tokens=400), a_job("p0", tokens=10, lane=Lane.P0))
    assert len(sent(scheduler.tick(0.0))) == 2
    first_token(scheduler, "p0")
    offer(scheduler, a_job("low", tokens=500, lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == ["low"]
