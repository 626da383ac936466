"""Worker groups per lane: batch workers apart from interactive ones, and batch jobs on idle interactive workers."""

import pytest

from inferry.cli.config.loader import dump, parse
from inferry.cli.config.schema import ConfigError
from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended
from inferry.scheduling.placement.borrowing import LEND_AFTER_S
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import end, offer, placements, sent
from support.builders import a_job, a_policy, a_view

LIVE = a_policy(ttft_ms=500, itl_ms=30, groups=("interactive",))


def two_groups(*, borrow: bool, sequences: int = 2) -> Scheduler:
    scheduler = Scheduler(
        {Lane.P0: LIVE, Lane.P1: LIVE, Lane.P2: a_policy(groups=("batch",), borrow_groups=borrow, share=0.05)}
    )
    for name in ("batch-0", "interactive-0", "interactive-1"):
        scheduler.observe(a_view(name, group=name.split("-")[0], sequences=sequences), 0.0)
    return scheduler


def batch_job(name: str, *, at: float = 0.0, resume: ResumeMode = ResumeMode.CONTINUE) -> InferenceJob:
    return a_job(name, lane=Lane.P2, at=at, resume=resume, stream=True)


def flood(scheduler: Scheduler, jobs: int = 20) -> None:
    offer(scheduler, *(batch_job(f"p2-{n}") for n in range(jobs)))


def test_a_batch_flood_leaves_interactive_workers_untouched() -> None:
    scheduler = two_groups(borrow=False)
    flood(scheduler)
    assert set(placements(scheduler.tick(0.0)).values()) == {"batch-0"}
    assert scheduler.use("interactive-0").sequences == scheduler.use("interactive-1").sequences == 0


def test_batch_jobs_fill_idle_interactive_workers_where_the_lane_may_borrow() -> None:
    scheduler = two_groups(borrow=True)
    flood(scheduler)
    assert sorted(placements(scheduler.tick(0.0)).values()) == [
        *("batch-0",) * 2,
        *("interactive-0",) * 2,
        *("interactive-1",) * 2,
    ]


def test_its_own_workers_come_before_borrowed_ones() -> None:
    scheduler = two_groups(borrow=True)
    flood(scheduler, 2)
    assert set(placements(scheduler.tick(0.0)).values()) == {"batch-0"}


def test_the_first_live_call_evicts_every_borrower_of_its_group_in_the_same_tick() -> None:
    scheduler = two_groups(borrow=True)
    flood(scheduler)
    borrowed = {job: worker for job, worker in placements(scheduler.tick(0.0)).items() if worker != "batch-0"}
    offer(scheduler, a_job("live", lane=Lane.P0, at=5.0))
    tick = scheduler.tick(5.0)
    assert {job.job_id for job in tick.evictions} == set(borrowed)
    assert sent(tick) == []
    end(scheduler, *borrowed, now=5.1)
    assert placements(scheduler.tick(5.1)) == {"live": "interactive-0"}
    assert scheduler.tick(5.1).evictions == ()


def test_a_group_is_lent_again_a_while_after_its_last_live_call() -> None:
    scheduler = two_groups(borrow=True)
    offer(scheduler, a_job("live", lane=Lane.P1))
    scheduler.tick(0.0)
    flood(scheduler)
    assert set(placements(scheduler.tick(0.0)).values()) == {"batch-0"}
    end(scheduler, "live", now=3.0)
    tick = scheduler.tick(3.0)
    assert (sent(tick), tick.wake_at) == ([], 3.0 + LEND_AFTER_S)
    scheduler.observe(a_view("batch-0", group="batch", sequences=3), 3.5)
    assert placements(scheduler.tick(3.5)) == {"p2-2": "batch-0"}
    assert set(placements(scheduler.tick(3.0 + LEND_AFTER_S)).values()) == {"interactive-0", "interactive-1"}


def test_a_stream_that_cannot_resume_borrows_no_worker() -> None:
    scheduler = two_groups(borrow=True)
    offer(scheduler, *(batch_job(f"{n}", resume=ResumeMode.RESTART) for n in range(6)))
    assert set(placements(scheduler.tick(0.0)).values()) == {"batch-0"}


def test_a_live_call_for_another_group_leaves_the_loan_alone() -> None:
    scheduler = two_groups(borrow=True)
    scheduler.observe(a_view("other-0", group="other", models=("n",)), 0.0)
    flood(scheduler)
    scheduler.tick(0.0)
    offer(scheduler, a_job("live", lane=Lane.P0, model="n", at=1.0))
    assert scheduler.tick(1.0).evictions == ()


def test_a_flood_in_virtual_time_delays_no_live_call_by_a_second() -> None:
    """Jobs run for 30 s and end 50 ms after their eviction; live calls come every 7 s and run for 1 s."""
    scheduler = two_groups(borrow=True, sequences=4)
    waiting: dict[str, float] = {}
    ends: dict[str, float] = {}
    attempts: dict[str, int] = {}
    on: dict[str, str] = {}
    waits, borrowed = [], 0
    flood(scheduler, 200)
    for step in range(6_000):
        now = step * 0.01
        for job_id in [job_id for job_id, at in ends.items() if at <= now]:
            del ends[job_id]
            scheduler.progress(job_id, Ended(), now)
            if job_id in attempts and attempts[job_id] < 0:
                attempts[job_id] = -attempts[job_id]
                job = batch_job(job_id, at=now)
                scheduler.offer(job, now)
        if step % 700 == 350:
            job_id = f"live-{step}"
            waiting[job_id] = now
            scheduler.offer(a_job(job_id, lane=Lane.P0, at=now), now)
        tick = scheduler.tick(now)
        for job_id, worker in placements(tick).items():
            on[job_id] = worker
            if job_id in waiting:
                waits.append(now - waiting[job_id])
                ends[job_id] = now + 1.0
            else:
                ends[job_id] = now + 30.0
                borrowed += worker != "batch-0"
        for job in tick.evictions:
            assert on[job.job_id] != "batch-0"
            ends[job.job_id] = now + 0.05
            attempts[job.job_id] = -(attempts.get(job.job_id, 0) + 1)
    assert len(waits) == 9
    assert max(waits) < 1.0
    assert borrowed > 8


# -- from the configuration ------------------------------------------------------------------------------------------

WORKERS = [
    {"kind": "vllm", "name": name, "url": "http://10.0.0.5:8000", "models": ["m"], "group": group}
    for name, group in (("a", "interactive"), ("b", "batch"))
]


def test_groups_are_read_from_the_configuration() -> None:
    config = parse(
        {
            "workers": WORKERS,
            "lanes": {"P0": {"groups": ["interactive"]}, "P2": {"groups": ["batch"], "borrow_groups": True}},
        }
    )
    policies = config.lane_policies()
    assert policies[Lane.P0].groups == ("interactive",)
    assert policies[Lane.P1].groups is None
    assert policies[Lane.P2].groups == ("batch",)
    assert policies[Lane.P2].borrow_groups
    assert "groups:\n    - batch" in dump(config)


@pytest.mark.parametrize(
    ("lanes", "problem"),
    [
        ({"P2": {"groups": []}}, "lanes.P2.groups is empty"),
        ({"P2": {"groups": ["bach"]}}, "lanes.P2.groups names bach, but no worker is in that group"),
        ({"P2": {"borrow_groups": True}}, "lanes.P2.borrow_groups needs lanes.P2.groups"),
        ({"P1": {"groups": ["batch"], "borrow_groups": True}}, "lanes.P1.borrow_groups is for batch lanes"),
    ],
)
def test_groups_that_cannot_work_are_refused(lanes: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse({"workers": WORKERS, "lanes": lanes})
