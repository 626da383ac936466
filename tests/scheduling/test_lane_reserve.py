"""Lower lanes leave part of every worker's capacity to higher ones."""

import pytest

from inferry.domain.lanes import Lane
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import end, offer, sent
from support.builders import a_job, a_policy, a_view


def with_reserve(reserve: float, share: float = 0.0, **capacity: int) -> Scheduler:
    scheduler = Scheduler({Lane.P0: a_policy(), Lane.P2: a_policy(reserve=reserve, share=share)})
    scheduler.observe(a_view(**capacity), 0.0)  # type: ignore[arg-type]
    return scheduler


@pytest.mark.parametrize(
    "capacity", [{"sequences": 4}, {"prefill_tokens": 200}, {"kv_tokens": 240}], ids=["sequences", "prefill", "kv"]
)
def test_batch_jobs_stop_where_the_reserve_begins_and_live_jobs_do_not(capacity: dict[str, int]) -> None:
    scheduler = with_reserve(0.25, **capacity)
    offer(scheduler, *(a_job(f"batch-{n}", tokens=50, lane=Lane.P2) for n in range(5)))
    assert sent(scheduler.tick(0.0)) == ["batch-0", "batch-1", "batch-2"]
    offer(scheduler, a_job("live", tokens=50, lane=Lane.P0))
    assert sent(scheduler.tick(0.0)) == ["live"]
    end(scheduler, "live")
    assert sent(scheduler.tick(0.0)) == []
    end(scheduler, "batch-0")
    assert sent(scheduler.tick(0.0)) == ["batch-3"]


def test_a_worker_of_one_slot_still_takes_batch_jobs() -> None:
    scheduler = with_reserve(0.25, sequences=1)
    offer(scheduler, a_job("batch", lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == ["batch"]


def test_a_batch_job_larger_than_its_part_enters_alone() -> None:
    scheduler = with_reserve(0.25, prefill_tokens=100)
    offer(scheduler, a_job("batch", tokens=90, lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == ["batch"]


def test_an_owed_lane_may_use_the_reserve() -> None:
    scheduler = with_reserve(0.5, share=0.5, sequences=4)
    offer(scheduler, *(a_job(f"live-{n}", tokens=100, lane=Lane.P0) for n in range(6)))
    offer(scheduler, *(a_job(f"batch-{n}", tokens=100, lane=Lane.P2) for n in range(3)))
    assert sent(scheduler.tick(0.0)) == ["live-0", "batch-0", "live-1", "batch-1"]


def test_a_served_lane_has_no_credit() -> None:
    scheduler = with_reserve(0.0, share=0.5, sequences=2)
    offer(scheduler, *(a_job(f"batch-{n}", tokens=100, lane=Lane.P2) for n in range(9)))
    assert sent(scheduler.tick(0.0)) == ["batch-0", "batch-1"]
    for n in range(3):  # a live job and a batch job go in turn, so the share is served by itself
        end(scheduler, f"batch-{n}")
        offer(scheduler, a_job(f"live-{n}", tokens=100, lane=Lane.P0))
        assert sent(scheduler.tick(0.0)) == [f"live-{n}"]
        end(scheduler, f"live-{n}")
        assert sent(scheduler.tick(0.0)) == [f"batch-{n + 2}"]


def test_a_job_that_fits_only_the_reserve_retries_when_its_lane_is_owed() -> None:
    scheduler = with_reserve(0.5, share=0.5, sequences=4)
    offer(scheduler, *(a_job(f"batch-{n}", tokens=1, lane=Lane.P2) for n in range(3)))
    assert sent(scheduler.tick(0.0)) == ["batch-0", "batch-1"]
    offer(scheduler, *(a_job(f"live-{n}", tokens=100, lane=Lane.P0) for n in range(3)))
    assert sent(scheduler.tick(0.0)) == ["live-0", "batch-2"]
