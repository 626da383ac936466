"""Batching windows: when jobs are held for others, and when they are released."""

import pytest

from inferry.domain.lanes import Lane
from inferry.domain.workers import Load
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, batches, end, expired, offer, reasons, sent
from support.builders import a_job, a_policy, a_view

FIXED = a_policy(window="fixed", coalesce_ms=10)
ADAPTIVE = a_policy(window="adaptive", coalesce_ms=10)


def test_a_lane_without_a_window_never_holds() -> None:
    scheduler = a_scheduler(a_view(pads=True, sequences=8), P1=a_policy(window="off", coalesce_ms=10))
    offer(scheduler, a_job("1"))
    assert reasons(scheduler.tick(0.0)) == ["immediate"]
    offer(scheduler, a_job("2"))
    assert reasons(scheduler.tick(0.0)) == ["immediate"]


def test_a_fixed_window_holds_a_job_from_its_arrival() -> None:
    scheduler = a_scheduler(a_view(), P1=FIXED)
    offer(scheduler, a_job("1", at=1.0), now=1.004)
    tick = scheduler.tick(1.004)
    assert sent(tick) == []
    assert tick.wake_at == pytest.approx(1.010)
    assert sent(scheduler.tick(1.0099)) == []
    tick = scheduler.tick(1.010)
    assert (sent(tick), reasons(tick)) == (["1"], ["window"])


def test_the_window_of_the_oldest_releases_the_whole_group() -> None:
    scheduler = a_scheduler(a_view(), P1=FIXED)
    offer(scheduler, a_job("1", at=0.0), a_job("2", at=0.006), a_job("3", at=0.009))
    tick = scheduler.tick(0.010)
    assert (batches(tick), reasons(tick), tick.wake_at) == ([["1", "2", "3"]], ["window"], None)


def test_a_full_group_goes_at_once() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", coalesce_ms=10, max_batch=3))
    offer(scheduler, a_job("1"), a_job("2"))
    assert sent(scheduler.tick(0.0)) == []
    offer(scheduler, a_job("3"), a_job("4"))
    tick = scheduler.tick(0.0)
    assert (batches(tick), reasons(tick)) == ([["1", "2", "3"]], ["size"])
    assert scheduler.queued == 1


@pytest.mark.parametrize(
    "capacity", [{"prefill_tokens": 100}, {"kv_tokens": 120}, {"sequences": 2}], ids=["prefill", "kv", "sequences"]
)
def test_a_group_that_fills_a_worker_goes_at_once(capacity: dict[str, int]) -> None:
    scheduler = a_scheduler(a_view(**capacity), P1=FIXED)  # type: ignore[arg-type]
    offer(scheduler, a_job("1", tokens=50, output=10))
    assert sent(scheduler.tick(0.0)) == []
    offer(scheduler, a_job("2", tokens=50, output=10))
    assert reasons(scheduler.tick(0.0)) == ["size"]


def test_a_group_is_not_full_while_one_worker_could_take_more() -> None:
    scheduler = a_scheduler(a_view("small", sequences=1), a_view("large", sequences=8), P1=FIXED)
    offer(scheduler, a_job("1"), a_job("2"))
    assert sent(scheduler.tick(0.0)) == []


def test_a_capacity_that_shrinks_to_the_group_releases_it() -> None:
    scheduler = a_scheduler(a_view("w", sequences=8), P1=FIXED)
    offer(scheduler, a_job("1"), a_job("2"))
    scheduler.tick(0.0)
    scheduler.observe(a_view("w", sequences=2), 0.0)
    assert reasons(scheduler.tick(0.0)) == ["size"]


def test_a_job_is_held_for_at_most_half_the_time_to_its_deadline_and_takes_the_group_along() -> None:
    scheduler = a_scheduler(a_view(), P1=FIXED)
    offer(scheduler, a_job("1"), a_job("hurried", deadline=0.008))
    assert scheduler.tick(0.0).wake_at == pytest.approx(0.004)
    tick = scheduler.tick(0.004)
    assert (batches(tick), reasons(tick)) == ([["1", "hurried"]], ["deadline"])


def test_a_p0_job_held_past_its_max_wait_goes_alone() -> None:
    scheduler = a_scheduler(a_view(), P0=FIXED)
    offer(scheduler, a_job("1", lane=Lane.P0), a_job("impatient", lane=Lane.P0, max_wait_s=0.002))
    assert scheduler.tick(0.0).wake_at == pytest.approx(0.002)
    tick = scheduler.tick(0.002)
    assert (batches(tick), reasons(tick)) == ([["impatient"]], ["max_wait"])
    assert batches(scheduler.tick(0.010)) == [["1"]]


def test_two_jobs_past_their_max_wait_go_in_two_plans() -> None:
    scheduler = a_scheduler(a_view(), P1=FIXED)
    offer(scheduler, a_job("1", max_wait_s=0.002), a_job("2", max_wait_s=0.002))
    tick = scheduler.tick(0.002)
    assert (batches(tick), reasons(tick)) == ([["1"], ["2"]], ["max_wait", "max_wait"])


def test_the_lane_bounds_holding_even_for_a_patient_job() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", coalesce_ms=10, max_wait_ms=3))
    offer(scheduler, a_job("1", max_wait_s=60.0))
    assert reasons(scheduler.tick(0.003)) == ["max_wait"]


def test_a_job_offered_after_its_window_is_not_held_again() -> None:
    scheduler = a_scheduler(a_view(), P1=FIXED)
    offer(scheduler, a_job("1", at=0.0), now=5.0)
    assert sent(scheduler.tick(5.0)) == ["1"]


def test_groups_of_other_lanes_and_routes_are_held_apart() -> None:
    scheduler = a_scheduler(a_view(models=("m", "n")), P1=FIXED, P2=FIXED)
    offer(scheduler, a_job("1", at=0.0), a_job("2", at=0.005, model="n"), a_job("3", at=0.006, lane=Lane.P2))
    assert sent(scheduler.tick(0.010)) == ["1"]
    assert sent(scheduler.tick(0.015)) == ["2"]
    assert sent(scheduler.tick(0.016)) == ["3"]


def test_batch_keys_are_held_apart_only_in_front_of_workers_that_pad() -> None:
    for pads in (False, True):
        scheduler = a_scheduler(a_view(pads=pads), P1=FIXED)
        offer(scheduler, a_job("1", at=0.0), a_job("2", at=0.005, group="other"))
        assert sent(scheduler.tick(0.010)) == (["1"] if pads else ["1", "2"])


def test_released_jobs_wait_for_capacity_in_order() -> None:
    scheduler = a_scheduler(a_view(sequences=1), P1=a_policy(window="fixed", coalesce_ms=10, max_batch=3))
    offer(scheduler, a_job("1"), a_job("2"), a_job("3"))
    assert sent(scheduler.tick(0.0)) == ["1"]
    end(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == ["2"]
    end(scheduler, "2")
    assert sent(scheduler.tick(0.0)) == ["3"]


def test_a_held_job_expires_when_the_tick_was_late() -> None:
    scheduler = a_scheduler(a_view(), P1=FIXED)
    offer(scheduler, a_job("1", deadline=0.008), a_job("2"))
    tick = scheduler.tick(0.009)
    assert (expired(tick), sent(tick), reasons(tick)) == (["1"], ["2"], ["deadline"])


def test_a_released_job_still_expires_while_it_waits_for_capacity() -> None:
    scheduler = a_scheduler(a_view(sequences=1), P1=FIXED)
    offer(scheduler, a_job("1"), a_job("2", deadline=1.0))
    assert sent(scheduler.tick(0.010)) == ["1"]
    assert scheduler.tick(0.5).wake_at == 1.0
    assert expired(scheduler.tick(1.0)) == ["2"]


def test_in_front_of_continuous_batching_the_adaptive_window_is_zero() -> None:
    scheduler = a_scheduler(a_view(sequences=8), P1=ADAPTIVE)
    for n in range(3):
        offer(scheduler, a_job(f"{n}"))
        assert reasons(scheduler.tick(0.0)) == ["immediate"]


def test_in_front_of_an_idle_padded_worker_the_adaptive_window_is_zero() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=ADAPTIVE)
    offer(scheduler, a_job("1"), a_job("2"))
    tick = scheduler.tick(0.0)
    assert (batches(tick), reasons(tick)) == ([["1", "2"]], ["immediate"])


def test_adaptive_holds_while_every_padded_worker_is_busy() -> None:
    scheduler = a_scheduler(a_view("a", pads=True, sequences=8), a_view("b", pads=True, sequences=8), P1=ADAPTIVE)
    offer(scheduler, a_job("1"))
    scheduler.tick(0.0)
    offer(scheduler, a_job("2"))
    assert sent(scheduler.tick(0.0)) == ["2"]
    offer(scheduler, a_job("3"))
    tick = scheduler.tick(0.0)
    assert sent(tick) == []
    assert tick.wake_at == pytest.approx(0.010)
    assert sent(scheduler.tick(0.010)) == []
    end(scheduler, "1", now=0.011)
    assert reasons(scheduler.tick(0.011)) == ["window"]


def test_adaptive_does_not_hold_where_one_worker_batches_continuously() -> None:
    scheduler = a_scheduler(a_view("a", pads=True, foreign=Load(running=1)), a_view("b", sequences=8), P1=ADAPTIVE)
    offer(scheduler, a_job("1"), a_job("2"))
    assert sent(scheduler.tick(0.0)) == ["1", "2"]


def test_held_jobs_go_at_once_when_a_padded_worker_becomes_idle() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=ADAPTIVE)
    offer(scheduler, a_job("1"))
    scheduler.tick(0.0)
    offer(scheduler, a_job("2"), a_job("3"))
    assert sent(scheduler.tick(0.001)) == []
    end(scheduler, "1", now=0.002)
    tick = scheduler.tick(0.002)
    assert (batches(tick), reasons(tick), tick.wake_at) == ([["2", "3"]], ["immediate"], None)


def test_an_idle_worker_does_not_end_a_fixed_window() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=FIXED)
    offer(scheduler, a_job("1"))
    scheduler.tick(0.010)
    offer(scheduler, a_job("2", at=0.010))
    end(scheduler, "1", now=0.011)
    assert sent(scheduler.tick(0.011)) == []


def test_held_jobs_go_at_once_when_a_continuous_worker_comes_up() -> None:
    scheduler = a_scheduler(a_view("a", pads=True), P1=ADAPTIVE)
    offer(scheduler, a_job("1"))
    scheduler.tick(0.0)
    offer(scheduler, a_job("2"))
    scheduler.tick(0.0)
    scheduler.observe(a_view("b"), 0.0)
    assert sent(scheduler.tick(0.0)) == ["2"]


def a_pass(scheduler: Scheduler, at: float, *, took: float) -> None:
    """One job comes to an idle worker, goes, and ends after so long; nobody else comes."""
    offer(scheduler, job := a_job(at=at))
    for now in (at, at + 0.010):
        scheduler.tick(now)
    end(scheduler, job.job_id, now=at + took)
    scheduler.tick(at + took)


def a_fan_out(scheduler: Scheduler, at: float, *, took: float, size: int = 4, apart: float = 0.0005) -> list[list[str]]:
    """Jobs come to an idle worker a moment apart, and every pass takes so long; return who went together."""
    groups: list[list[str]] = []
    jobs = [a_job(at=at + n * apart) for n in range(size)]
    events: list[float] = [job.arrived_at for job in jobs]
    ends: dict[float, list[str]] = {}
    while events:
        now = min(events)
        events.remove(now)
        offer(scheduler, *(job for job in jobs if job.arrived_at == now))
        end(scheduler, *ends.pop(now, ()), now=now)
        tick = scheduler.tick(now)
        for group in batches(tick):
            groups.append(group)
            ends[now + took] = ends.get(now + took, []) + group
        events += [when for when in (tick.wake_at, *ends) if when is not None and when not in events]
    return groups


def test_adaptive_learns_to_hold_for_followers_that_always_arrive() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=ADAPTIVE)
    assert [len(group) for group in a_fan_out(scheduler, 0.0, took=0.040)] == [1, 3]
    for n in range(1, 6):
        a_fan_out(scheduler, float(n), took=0.040)
    assert [len(group) for group in a_fan_out(scheduler, 6.0, took=0.040)] == [4]


def test_adaptive_does_not_hold_for_followers_that_never_arrive() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=ADAPTIVE)
    for n in range(20):
        a_pass(scheduler, float(n), took=0.040)
    offer(scheduler, a_job("1", at=30.0))
    assert reasons(scheduler.tick(30.0)) == ["immediate"]


def test_adaptive_stops_holding_when_followers_stop_arriving() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=ADAPTIVE)
    for n in range(10):
        a_fan_out(scheduler, float(n), took=0.040)
    offer(scheduler, a_job("held", at=10.0))
    assert sent(scheduler.tick(10.0)) == []
    scheduler.tick(10.010)
    end(scheduler, "held", now=10.040)
    for n in range(11, 20):
        a_pass(scheduler, float(n), took=0.040)
    offer(scheduler, a_job("1", at=30.0))
    assert reasons(scheduler.tick(30.0)) == ["immediate"]


@pytest.mark.parametrize(("took", "held_s"), [(0.020, 0.005), (0.400, 0.010)], ids=["part of a pass", "the window"])
def test_an_idle_worker_waits_for_a_part_of_its_pass_and_never_beyond_the_window(took: float, held_s: float) -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=ADAPTIVE)
    for n in range(10):
        a_fan_out(scheduler, 2.0 * n, took=took)
    offer(scheduler, a_job("1", at=50.0), a_job("2", at=50.001))
    tick = scheduler.tick(50.001)
    assert sent(tick) == []
    assert tick.wake_at == pytest.approx(50.0 + held_s)
    tick = scheduler.tick(50.0 + held_s)
    assert (batches(tick), reasons(tick)) == ([["1", "2"]], ["window"])


def test_jobs_that_wait_before_an_idle_worker_go_when_they_are_enough_or_may_wait_no_longer() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=a_policy(window="adaptive", coalesce_ms=10, max_batch=4))
    for n in range(10):
        a_fan_out(scheduler, float(n), took=0.040)
    offer(scheduler, *(a_job(f"{n}", at=20.0) for n in range(4)))
    assert reasons(scheduler.tick(20.0)) == ["size"]
    end(scheduler, "0", "1", "2", "3", now=20.040)
    scheduler.tick(20.040)
    offer(scheduler, a_job("impatient", at=21.0, max_wait_s=0.002))
    assert scheduler.tick(21.0).wake_at == pytest.approx(21.002)


def test_siblings_are_not_held_before_workers_that_batch_continuously() -> None:
    scheduler = a_scheduler(a_view("a", sequences=8), a_view("b", sequences=8), P1=ADAPTIVE)
    for n in range(10):
        offer(scheduler, *(a_job(f"{n}-{k}", at=n, template_id="t", prefix=("p",), tokens=2000) for k in range(4)))
        tick = scheduler.tick(n)
        assert len(sent(tick)) == 4
        end(scheduler, *sent(tick), now=n + 0.5)
