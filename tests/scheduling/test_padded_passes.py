"""Padded passes in the scheduler: which jobs share one, and which may join one that runs."""

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.domain.routes import BatchKey, RouteKey, Task
from inferry.domain.values import replace
from scheduling.scheduler_harness import a_scheduler, batches, end, offer, sent
from support.builders import a_job, a_policy, a_view

ADAPTIVE = a_policy(window="adaptive", coalesce_ms=10)


def test_a_pass_that_refills_is_joined_while_it_has_free_rows() -> None:
    scheduler = a_scheduler(a_view(pads=True, refills=True, sequences=2), P1=ADAPTIVE)
    offer(scheduler, a_job("1"))
    assert sent(scheduler.tick(0.0)) == ["1"]
    offer(scheduler, a_job("2"), a_job("3"))
    assert sent(scheduler.tick(0.001)) == ["2"]
    assert sent(scheduler.tick(0.020)) == []
    end(scheduler, "1", now=0.021)
    assert sent(scheduler.tick(0.021)) == ["3"]


def test_jobs_held_before_a_pass_that_refills_go_when_one_of_its_jobs_ends() -> None:
    scheduler = a_scheduler(a_view(pads=True, refills=True, sequences=2), P1=ADAPTIVE)
    offer(scheduler, a_job("1"), a_job("2"))
    assert batches(scheduler.tick(0.0)) == [["1", "2"]]
    offer(scheduler, a_job("3"))
    assert sent(scheduler.tick(0.001)) == []
    end(scheduler, "2", now=0.002)
    assert sent(scheduler.tick(0.002)) == ["3"]


def test_a_pass_without_refills_is_not_joined() -> None:
    scheduler = a_scheduler(a_view(pads=True, sequences=3), P1=ADAPTIVE)
    offer(scheduler, a_job("1"), a_job("2"))
    scheduler.tick(0.0)
    offer(scheduler, a_job("3"))
    end(scheduler, "2", now=0.002)
    assert sent(scheduler.tick(0.5)) == []
    end(scheduler, "1", now=0.6)
    assert sent(scheduler.tick(0.6)) == ["3"]


def test_prompts_of_different_buckets_share_no_padded_pass() -> None:
    policy = a_policy(window="adaptive", coalesce_ms=10, prompt_buckets=(100, 400))
    scheduler = a_scheduler(a_view("a", pads=True), a_view("b", pads=True), a_view("c", pads=True), P1=policy)
    lengths = {"1": 90, "2": 500, "3": 101, "4": 100, "5": 400, "6": 900}
    offer(scheduler, *(a_job(name, tokens=tokens) for name, tokens in lengths.items()))
    tick = scheduler.tick(0.0)
    assert sorted(batches(tick)) == [["1", "4"], ["2", "6"], ["3", "5"]]
    assert sorted(plan.padded_tokens or 0 for plan in tick.plans) == [100, 400, 900]


def test_without_workers_that_pad_buckets_do_not_matter() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="adaptive", prompt_buckets=(100,)))
    offer(scheduler, a_job("1", tokens=10), a_job("2", tokens=500))
    assert batches(scheduler.tick(0.0)) == [["1", "2"]]


def test_batch_keys_share_no_plan_of_a_worker_that_pads() -> None:
    scheduler = a_scheduler(a_view(pads=True), P1=ADAPTIVE)
    keys = [BatchKey(RouteKey("m"), streaming=True), BatchKey(RouteKey("m")), BatchKey(RouteKey("m"), task=Task.SCORE)]
    offer(scheduler, *(replace(a_job(str(number)), batch_key=keys[number % 3]) for number in range(6)))
    plans = [*scheduler.tick(0.0).plans]
    for now in (1.0, 2.0):
        for job in plans[-1].jobs:
            end(scheduler, job.job_id, now=now)
        plans += scheduler.tick(now).plans
    assert sorted(tuple(job.job_id for job in plan.jobs) for plan in plans) == [("0", "3"), ("1", "4"), ("2", "5")]


@pytest.mark.parametrize("buckets", [[0, 5], [10, 5], [5, 5]])
def test_buckets_that_are_not_ascending_are_refused(buckets: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"lanes\.P1\.prompt_buckets must be token counts in ascending order"):
        parse({"lanes": {"P1": {"prompt_buckets": buckets}}})
