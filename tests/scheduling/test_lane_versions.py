"""Two versions of lane rules in one scheduler: queues side by side, and a change of version without losing a job."""

from inferry.domain.lanes import Lane, LanePolicy, ReleaseReason
from inferry.domain.run_split import RunSplit
from inferry.scheduling.lane_switch import LaneTrial
from inferry.scheduling.scheduler import Scheduler
from support.builders import a_job, a_policy, a_view

PLAIN = {lane: a_policy() for lane in Lane}
HELD = {lane: a_policy(window="fixed", coalesce_ms=400, max_wait_ms=1000) for lane in Lane}
ALL, NONE = RunSplit("salt", 1.0), RunSplit("salt", 0.0)


def a_scheduler(lanes: dict[Lane, LanePolicy] = PLAIN, sequences: int = 8) -> Scheduler:
    scheduler = Scheduler(lanes)
    scheduler.observe(a_view("w", sequences=sequences), 0.0)
    return scheduler


def planned(scheduler: Scheduler, now: float) -> list[str]:
    return [job.job_id for plan in scheduler.tick(now).plans for job in plan.jobs]


def test_runs_of_a_trial_have_the_rules_of_the_candidate_and_others_keep_theirs() -> None:
    split = RunSplit("salt", 0.5)
    taken = next(f"r{number}" for number in range(100) if split.takes("t", f"r{number}"))
    other = next(f"r{number}" for number in range(100) if not split.takes("t", f"r{number}"))
    scheduler = a_scheduler()
    scheduler.use_lanes(PLAIN, 1, LaneTrial(HELD, 2, split))
    scheduler.offer(a_job("tried", tenant="t", run_id=taken), 0.0)
    scheduler.offer(a_job("plain", tenant="t", run_id=other), 0.0)
    assert planned(scheduler, 0.0) == ["plain"]
    assert planned(scheduler, 0.399) == []
    (plan,) = scheduler.tick(0.4).plans
    assert ([job.job_id for job in plan.jobs], plan.reason) == (["tried"], ReleaseReason.WINDOW)


def test_the_end_of_a_trial_releases_the_jobs_that_its_rules_hold() -> None:
    scheduler = a_scheduler()
    scheduler.use_lanes(PLAIN, 1, LaneTrial(HELD, 2, ALL))
    scheduler.offer(a_job("tried"), 0.0)
    assert planned(scheduler, 0.0) == []
    scheduler.use_lanes(PLAIN, 1)
    assert planned(scheduler, 0.1) == ["tried"]
    assert scheduler.queued == 0


def test_jobs_queued_before_a_change_of_version_go_in_their_order() -> None:
    scheduler = a_scheduler(sequences=1)
    for number in range(3):
        scheduler.offer(a_job(f"old-{number}", at=float(number)), float(number))
    assert planned(scheduler, 3.0) == ["old-0"]
    scheduler.use_lanes({lane: a_policy(max_batch=2) for lane in Lane}, 1)
    scheduler.offer(a_job("new", at=4.0), 4.0)
    assert scheduler.queued == 3
    gone: list[str] = []
    for _ in range(3):
        scheduler.observe(a_view("w", sequences=2 + len(gone)), 5.0)
        gone += planned(scheduler, 5.0)
    assert gone == ["old-1", "old-2", "new"]


def test_groups_and_limits_of_a_new_version_hold_at_once() -> None:
    scheduler = a_scheduler()
    scheduler.use_lanes({lane: a_policy(groups=("other",)) for lane in Lane}, 1)
    scheduler.offer(a_job("a"), 0.0)
    assert planned(scheduler, 0.0) == []
    scheduler.use_lanes(PLAIN, 2)
    assert planned(scheduler, 0.0) == ["a"]


def test_a_run_is_always_taken_or_never_and_a_larger_share_keeps_those_taken() -> None:
    small, large = RunSplit("salt", 0.2), RunSplit("salt", 0.6)
    runs = [f"run-{number}" for number in range(2000)]
    taken = {run for run in runs if small.takes("t", run)}
    assert taken == {run for run in runs if small.takes("t", run)}
    assert taken <= {run for run in runs if large.takes("t", run)}
    assert 0.15 < len(taken) / len(runs) < 0.25
    assert taken != {run for run in runs if RunSplit("other", 0.2).takes("t", run)}
    assert not any(NONE.takes("t", run) for run in runs)
    assert all(ALL.takes("t", run) for run in runs)
