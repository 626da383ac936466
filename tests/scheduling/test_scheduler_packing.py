"""Packing: every capacity limit, and the jobs of one plan."""

from typing import Literal

import pytest

from inferry.domain.lanes import Lane
from inferry.domain.workers import Load
from scheduling.scheduler_harness import a_scheduler, batches, end, first_token, offer, reasons, sent
from support.builders import a_job, a_policy, a_view

ADAPTIVE = a_policy(window="adaptive")


@pytest.mark.parametrize(
    "capacity", [{"prefill_tokens": 100}, {"kv_tokens": 120}, {"sequences": 2}], ids=["prefill", "kv", "sequences"]
)
def test_every_capacity_limit_binds(capacity: dict[str, int]) -> None:
    scheduler = a_scheduler(a_view(**capacity))  # type: ignore[arg-type]
    offer(scheduler, *(a_job(f"{n}", tokens=50, output=10) for n in range(3)))
    assert sent(scheduler.tick(0.0)) == ["0", "1"]


def test_the_first_token_frees_prefill_only() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=50, kv_tokens=120))
    offer(scheduler, *(a_job(f"{n}", tokens=50, output=10) for n in range(3)))
    assert sent(scheduler.tick(0.0)) == ["0"]
    first_token(scheduler, "0")
    assert sent(scheduler.tick(0.0)) == ["1"]
    first_token(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == []
    end(scheduler, "0")
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_cached_prompt_tokens_cost_no_prefill() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=50))
    offer(scheduler, *(a_job(f"{n}", tokens=50, cached=40) for n in range(6)))
    assert len(sent(scheduler.tick(0.0))) == 5


def test_foreign_work_uses_capacity() -> None:
    scheduler = a_scheduler(a_view(sequences=4, kv_tokens=1000, foreign=Load(running=1, waiting=1, kv_tokens=10)))
    offer(scheduler, *(a_job(f"{n}") for n in range(4)))
    assert sent(scheduler.tick(0.0)) == ["0", "1"]


@pytest.mark.parametrize("capacity", [{"prefill_tokens": 100}, {"kv_tokens": 100}], ids=["prefill", "kv"])
def test_a_job_larger_than_a_limit_is_admitted_alone(capacity: dict[str, int]) -> None:
    scheduler = a_scheduler(a_view(**capacity))  # type: ignore[arg-type]
    offer(scheduler, a_job("small", tokens=10), a_job("huge", tokens=500), a_job("next", tokens=10))
    assert sent(scheduler.tick(0.0)) == ["small"]
    end(scheduler, "small")
    assert sent(scheduler.tick(0.0)) == ["huge"]
    end(scheduler, "huge")
    assert sent(scheduler.tick(0.0)) == ["next"]


def test_a_huge_prompt_may_join_sequences_that_only_decode() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=100, sequences=4))
    offer(scheduler, a_job("small", tokens=10), a_job("huge", tokens=500))
    scheduler.tick(0.0)
    first_token(scheduler, "small")
    assert sent(scheduler.tick(0.0)) == ["huge"]


@pytest.mark.parametrize("capacity", [{"prefill_tokens": 0}, {"kv_tokens": 0}, {"sequences": 0}])
def test_a_worker_without_capacity_admits_no_job(capacity: dict[str, int]) -> None:
    scheduler = a_scheduler(a_view(**capacity))  # type: ignore[arg-type]
    offer(scheduler, a_job("1"))
    assert sent(scheduler.tick(0.0)) == []


def test_jobs_that_go_to_one_worker_for_one_reason_form_one_plan_across_lanes() -> None:
    scheduler = a_scheduler(a_view())
    offer(scheduler, a_job("1"), a_job("2", lane=Lane.P0), a_job("3", lane=Lane.P2))
    assert batches(scheduler.tick(0.0)) == [["2", "1", "3"]]


def test_jobs_with_other_reasons_go_in_other_plans() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", coalesce_ms=10))
    offer(scheduler, a_job("held", at=0.0), a_job("plain", at=0.010, lane=Lane.P2))
    tick = scheduler.tick(0.010)
    assert (batches(tick), reasons(tick)) == ([["held"], ["plain"]], ["window", "immediate"])


def test_a_padded_pass_has_one_batch_key_and_says_how_long_it_is() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=ADAPTIVE)
    offer(scheduler, a_job("a1", tokens=20), a_job("b1", group="x"), a_job("a2", tokens=70), a_job("a3", tokens=30))
    (plan,) = scheduler.tick(0.0).plans
    assert [job.job_id for job in plan.jobs] == ["a1", "a2", "a3"]
    assert plan.padded_tokens == 70
    end(scheduler, "a1", "a2")
    assert sent(scheduler.tick(0.0)) == []
    end(scheduler, "a3")
    assert sent(scheduler.tick(0.0)) == ["b1"]


def test_a_padded_pass_is_no_larger_than_max_batch() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=a_policy(window="adaptive", max_batch=2))
    offer(scheduler, *(a_job(f"{n}") for n in range(3)))
    assert batches(scheduler.tick(0.0)) == [["0", "1"]]


def test_a_padded_pass_stays_within_the_capacity() -> None:
    scheduler = a_scheduler(a_view(pads=True, prefill_tokens=120))
    offer(scheduler, *(a_job(f"{n}", tokens=50) for n in range(3)))
    assert batches(scheduler.tick(0.0)) == [["0", "1"]]


@pytest.mark.parametrize("sequences", [None, 8])
@pytest.mark.parametrize(("window", "expected"), [("off", ["2"]), ("adaptive", []), ("fixed", [])])
def test_a_running_padded_pass_is_joined_only_by_lanes_without_a_window(
    window: Literal["adaptive", "fixed", "off"], expected: list[str], sequences: int | None
) -> None:
    scheduler = a_scheduler(a_view(pads=True, sequences=sequences), P1=a_policy(window=window))
    offer(scheduler, a_job("1"))
    scheduler.tick(0.010)
    offer(scheduler, a_job("2", at=0.010))
    assert sent(scheduler.tick(0.020)) == expected
    end(scheduler, "1", now=0.021)
    assert sent(scheduler.tick(0.021)) == ["2"][len(expected) :]


def test_a_padded_pass_takes_lower_lanes_along() -> None:
    scheduler = a_scheduler(a_view(pads=True))
    offer(scheduler, a_job("low", lane=Lane.P2), a_job("high", lane=Lane.P0))
    assert batches(scheduler.tick(0.0)) == [["high", "low"]]


def test_a_padded_pass_is_filled_whatever_released_it() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=a_policy(window="fixed", coalesce_ms=10, max_batch=2), P2=ADAPTIVE)
    offer(scheduler, *(a_job(f"{n}", lane=Lane.P1) for n in range(2)))
    offer(scheduler, a_job("low", lane=Lane.P2))
    tick = scheduler.tick(0.0)
    assert (batches(tick), reasons(tick)) == ([["0", "1"]], ["size"])
    end(scheduler, "0", "1")
    offer(scheduler, a_job("held", at=0.0))
    tick = scheduler.tick(0.010)
    assert (batches(tick), reasons(tick)) == ([["held", "low"]], ["window"])


def test_a_job_past_its_max_wait_has_the_padded_pass_to_itself() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=a_policy(window="fixed", coalesce_ms=10), P2=ADAPTIVE)
    offer(scheduler, a_job("impatient", max_wait_s=0.001), a_job("low", lane=Lane.P2, at=0.001))
    assert batches(scheduler.tick(0.001)) == [["impatient"]]
