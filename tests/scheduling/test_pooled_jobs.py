"""Jobs that embed or score: held while a pass of such jobs runs, and sent together."""

from typing import Any

from inferry.domain.jobs import InferenceJob
from inferry.domain.routes import Task
from inferry.domain.values import replace
from scheduling.scheduler_harness import a_scheduler, batches, end, offer, reasons, sent
from support.builders import a_job, a_policy, a_view

ADAPTIVE = a_policy(window="adaptive", coalesce_ms=10)


def an_embedding(job_id: str, **fields: Any) -> InferenceJob:
    job = a_job(job_id, output=0, **fields)
    route = replace(job.route, pooled=True)
    return replace(job, route=route, batch_key=replace(job.batch_key, route=route, task=Task.EMBED))


def test_a_first_job_goes_at_once() -> None:
    scheduler = a_scheduler(a_view(), P1=ADAPTIVE)
    offer(scheduler, an_embedding("1"))
    assert reasons(scheduler.tick(0.0)) == ["immediate"]


def test_jobs_that_arrive_during_a_pass_are_one_plan_after_it() -> None:
    scheduler = a_scheduler(a_view(), P1=ADAPTIVE)
    offer(scheduler, an_embedding("1"))
    scheduler.tick(0.0)
    offer(scheduler, *(an_embedding(str(number), at=0.001) for number in range(2, 40)))
    assert sent(scheduler.tick(0.001)) == []
    end(scheduler, "1", now=0.004)
    assert batches(scheduler.tick(0.004)) == [[str(number) for number in range(2, 40)]]


def test_a_pass_ends_with_its_last_job() -> None:
    scheduler = a_scheduler(a_view(), P1=ADAPTIVE)
    offer(scheduler, an_embedding("1"), an_embedding("2"))
    scheduler.tick(0.0)
    offer(scheduler, an_embedding("3", at=0.001))
    end(scheduler, "1", now=0.002)
    assert sent(scheduler.tick(0.002)) == []
    end(scheduler, "2", now=0.003)
    assert sent(scheduler.tick(0.003)) == ["3"]


def test_a_job_waits_for_a_pass_no_longer_than_the_window() -> None:
    scheduler = a_scheduler(a_view(), P1=ADAPTIVE)
    offer(scheduler, an_embedding("1"))
    scheduler.tick(0.0)
    offer(scheduler, an_embedding("2", at=0.001), an_embedding("3", at=0.005))
    assert sent(scheduler.tick(0.0109)) == []
    tick = scheduler.tick(0.011)
    assert (batches(tick), reasons(tick)) == ([["2", "3"]], ["window"])


def test_a_full_batch_goes_beside_a_running_pass() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="adaptive", coalesce_ms=10, max_batch=4))
    offer(scheduler, an_embedding("1"))
    scheduler.tick(0.0)
    offer(scheduler, *(an_embedding(str(number)) for number in range(2, 6)))
    tick = scheduler.tick(0.0)
    assert (batches(tick), reasons(tick)) == ([["2", "3", "4", "5"]], ["size"])


def test_a_worker_without_a_pass_takes_the_next_job() -> None:
    scheduler = a_scheduler(a_view("a"), a_view("b"), P1=ADAPTIVE)
    offer(scheduler, an_embedding("1"))
    scheduler.tick(0.0)
    offer(scheduler, an_embedding("2"))
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_jobs_that_generate_neither_hold_nor_are_held() -> None:
    scheduler = a_scheduler(a_view(), P1=ADAPTIVE)
    offer(scheduler, a_job("generates"), an_embedding("1"))
    assert sorted(sent(scheduler.tick(0.0))) == ["1", "generates"]
    offer(scheduler, a_job("next"), an_embedding("2"))
    assert sent(scheduler.tick(0.0)) == ["next"]
    end(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_a_lane_without_a_window_never_holds() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="off", coalesce_ms=10))
    offer(scheduler, an_embedding("1"))
    scheduler.tick(0.0)
    offer(scheduler, an_embedding("2"))
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_followers_are_awaited_where_they_have_come_before_for_a_part_of_a_pass() -> None:
    scheduler = a_scheduler(a_view(), P1=ADAPTIVE)
    for burst in range(12):
        at = float(burst)
        offer(scheduler, an_embedding(f"{burst}-1", at=at))
        held = not sent(scheduler.tick(at))
        offer(scheduler, an_embedding(f"{burst}-2", at=at + 0.0001), an_embedding(f"{burst}-3", at=at + 0.0002))
        scheduler.tick(at + 0.02)
        end(scheduler, f"{burst}-1", f"{burst}-2", f"{burst}-3", now=at + 0.03)
        scheduler.tick(at + 0.04)
        end(scheduler, f"{burst}-2", f"{burst}-3", now=at + 0.05)
    assert held
