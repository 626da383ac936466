"""Placement: eligible workers, and the least loaded of them."""

import pytest

from inferry.domain.jobs import InferenceJob
from inferry.domain.workers import Load, WorkerView
from scheduling.scheduler_harness import a_scheduler, end, offer, placements, sent
from support.builders import a_job, a_view


@pytest.mark.parametrize(
    ("job", "view"),
    [
        (a_job(model="n"), a_view()),
        (a_job(adapter="x"), a_view()),
        (a_job(adapter="x"), a_view(adapters=("y",))),
        (a_job(isolation="acme"), a_view()),
        (a_job(), a_view(isolation="acme")),
        (a_job(isolation="acme"), a_view(isolation="other")),
        (a_job(precision="fp8"), a_view()),
    ],
    ids=["model", "no adapter", "other adapter", "needs pool", "foreign pool", "other pool", "precision"],
)
def test_a_worker_of_another_kind_is_never_used(job: InferenceJob, view: WorkerView) -> None:
    scheduler = a_scheduler(view)
    offer(scheduler, job)
    assert sent(scheduler.tick(0.0)) == []


@pytest.mark.parametrize(
    ("job", "view"),
    [
        (a_job(adapter="x"), a_view(adapters=("x", "y"))),
        (a_job(), a_view(adapters=("x",))),
        (a_job(isolation="acme"), a_view(isolation="acme")),
    ],
    ids=["adapter", "no adapter wanted", "own pool"],
)
def test_a_worker_of_the_right_kind_is_used(job: InferenceJob, view: WorkerView) -> None:
    scheduler = a_scheduler(view)
    offer(scheduler, job)
    assert sent(scheduler.tick(0.0)) == [job.job_id]


def test_the_least_loaded_worker_is_picked_and_ties_go_by_name() -> None:
    scheduler = a_scheduler(a_view("b", sequences=4), a_view("a", sequences=4), a_view("c", sequences=8))
    offer(scheduler, *(a_job(f"{n}") for n in range(5)))
    assert placements(scheduler.tick(0.0)) == {"0": "a", "1": "b", "2": "c", "3": "c", "4": "a"}


def test_load_is_the_largest_used_fraction() -> None:
    scheduler = a_scheduler(
        a_view("a", sequences=100, kv_tokens=100, foreign=Load(running=1, kv_tokens=50)),
        a_view("b", sequences=10, kv_tokens=1000, foreign=Load(running=4, kv_tokens=100)),
    )
    offer(scheduler, a_job("1", tokens=10))
    assert placements(scheduler.tick(0.0)) == {"1": "b"}


def test_workers_without_limits_share_the_work() -> None:
    scheduler = a_scheduler(a_view("a"), a_view("b"))
    offer(scheduler, *(a_job(f"{n}") for n in range(4)))
    assert placements(scheduler.tick(0.0)) == {"0": "a", "1": "b", "2": "a", "3": "b"}


def test_a_loaded_worker_is_passed_over_until_its_jobs_end() -> None:
    scheduler = a_scheduler(a_view("a", sequences=4), a_view("b", sequences=4))
    offer(scheduler, a_job("1"), a_job("2"), a_job("3"))
    assert placements(scheduler.tick(0.0)) == {"1": "a", "2": "b", "3": "a"}
    end(scheduler, "1", "3")
    offer(scheduler, a_job("4"))
    assert placements(scheduler.tick(0.0)) == {"4": "a"}


def test_a_worker_that_lost_a_job_gets_it_again_only_if_no_other_is_up() -> None:
    scheduler = a_scheduler(a_view("a"), a_view("b", foreign=Load(running=9)))
    offer(scheduler, a_job("1", avoid=("a",), attempt=2))
    assert placements(scheduler.tick(0.0)) == {"1": "b"}
    end(scheduler, "1")
    scheduler.forget("b")
    offer(scheduler, a_job("1", avoid=("a",), attempt=2))
    assert placements(scheduler.tick(0.0)) == {"1": "a"}
