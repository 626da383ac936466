"""Capacities of workers in the dispatch loop."""

import pytest

from inferry.dispatch.capacity import CapacityTracker
from inferry.domain.attempts import Attempt
from inferry.domain.decisions import Decision
from inferry.domain.lanes import DEFAULT_LANES, Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, WorkerView
from support.builders import a_job, a_view


def _view(**changes: object) -> WorkerView:
    return replace(a_view("w", sequences=64, kv_tokens=10_000), controlled=True, chunk_tokens=2048, **changes)


def send_job(tracker: CapacityTracker, now: float, *, tokens: int = 100, lane: Lane = Lane.P1) -> Attempt:
    job = a_job(f"{now}", tokens=tokens, lane=lane, at=now)
    attempt = Attempt(job)
    plan = BatchPlan(plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=now)
    attempt.sent(plan, now)
    tracker.sent(attempt, now)
    return attempt


def serve(tracker: CapacityTracker, seconds: float) -> float:
    """A job after the other, ten tokens each in steps of 10 ms; the time it is then."""
    now = 0.0
    while now < seconds:
        attempt = send_job(tracker, now)
        now += 0.02
        attempt.first_token(now)
        tracker.first_token(attempt, now)
        for _ in range(10):
            now += 0.01
            attempt.output_tokens += 1
            tracker.refresh(now)
        tracker.ended(attempt, now)
    return now


def test_a_fixed_capacity_is_not_changed() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    view = a_view("w", sequences=64, kv_tokens=10_000)
    assert tracker.update_view(view, 0.0) is view
    serve(tracker, 2.0)
    assert tracker.refresh(2.0) == []


def test_a_controlled_capacity_stays_within_the_worker_limits() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    capacity = tracker.update_view(_view(), 0.0).capacity
    assert capacity.sequences == 64
    assert (capacity.kv_tokens or 0) <= 10_000


def test_the_capacity_follows_observed_traffic() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    tracker.update_view(_view(), 0.0)
    now = serve(tracker, 5.0)
    attempt = send_job(tracker, now)
    attempt.first_token(now + 0.02)
    tracker.first_token(attempt, now + 0.02)
    assert tracker.update_view(_view(), now + 0.02).capacity.prefill_tokens_per_s is not None


def test_the_scheduler_is_notified_only_of_changed_capacities() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    tracker.update_view(_view(), 0.0)
    now = serve(tracker, 5.0)
    tracker.refresh(now + 2.0)
    assert tracker.refresh(now + 2.0) == []
    assert tracker.refresh(now + 2.05) == []


def test_changed_limits_are_applied() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    tracker.update_view(_view(), 0.0)
    assert tracker.update_view(_view(capacity=Capacity(sequences=7, kv_tokens=10_000)), 1.0).capacity.sequences == 7


def test_jobs_sent_before_a_worker_was_controlled_are_not_counted() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    attempt = send_job(tracker, 0.0)
    tracker.update_view(_view(), 0.0)
    attempt.first_token(0.1)
    tracker.first_token(attempt, 0.1)
    tracker.ended(attempt, 0.2)
    assert tracker.update_view(_view(), 1.0).capacity.sequences == 64


def test_a_job_that_ends_before_its_first_token_leaves_no_state() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    tracker.update_view(_view(), 0.0)
    for number in range(10):
        tracker.ended(send_job(tracker, float(number)), number + 0.5)
    assert not tracker._tracked["w"].jobs
    assert tracker._tracked["w"].controller._decoding_now() == 0


def miss_targets(tracker: CapacityTracker, now: float) -> None:
    """Streams that are late on every worker: how long jobs may be held back is bounded only then."""
    for tracked in tracker._tracked.values():
        for _ in range(3):
            tracked.controller.sent(Lane.P0, 10, now)
            late = tracked.controller.first_token(Lane.P0, 10, now - 60, now)
            tracked.controller.ended(Lane.P0, late, now)


def test_queued_jobs_are_given_in_rotation_to_the_models_of_the_workers_that_serve_them() -> None:
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth())
    for name in ("w", "v"):
        tracker.update_view(replace(_view(), worker=name), 0.0)
    tracker.update_view(_view(worker="other", models=frozenset({"n"})), 0.0)
    now = serve(tracker, 5.0)
    miss_targets(tracker, now)
    for number in range(40):
        tracker.queued(Attempt(a_job(f"{number}", tokens=2_000, lane=Lane.P2, at=now)), now)
    waits = {view.worker: view.capacity.direct for view in tracker.refresh(now)}
    assert waits["w"] is not None
    assert waits["w"].waits_s[Lane.P2] > 1.0
    assert "other" not in waits
    alone = CapacityTracker(DEFAULT_LANES, QueueDepth())
    alone.update_view(_view(), 0.0)
    serve(alone, 5.0)
    miss_targets(alone, now)
    for number in range(20):
        alone.queued(Attempt(a_job(f"{number}", tokens=2_000, lane=Lane.P2, at=now)), now)
    assert alone.refresh(now)[0].capacity.direct == waits["w"]


@pytest.mark.plain  # The controller is replaced in one place, which compiled classes do not allow.
def test_the_controller_counts_what_the_worker_of_the_job_has_to_compute() -> None:
    told: list[int] = []
    reported: list[tuple[str, int, int]] = []
    tracker = CapacityTracker(DEFAULT_LANES, QueueDepth(), lambda *hits: reported.append(hits))
    tracker.update_view(_view(prefix_hits=0), 0.0)
    tracker._tracked["w"].controller.sent = lambda lane, tokens, now: told.append(tokens)  # type: ignore[method-assign, assignment]
    for number, cached in enumerate((80, 20)):
        job = a_job(f"{number}", tokens=100, cached=80)
        attempt = Attempt(job)
        attempt.sent(BatchPlan(plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0), 0.0)
        attempt.decision = Decision(picked_by="least_loaded", cached_tokens=cached)
        tracker.sent(attempt, 0.0)
        attempt.first_token(0.1)
        tracker._tracked["w"].controller._activities[job.lane].prefilling += 1
        tracker.first_token(attempt, 0.1)
    assert told == [20, 80]
    tracker.update_view(_view(prefix_hits=96), 0.2)
    assert reported[-1] == ("m", 80, 96), "only of jobs that went where their prefix is"
