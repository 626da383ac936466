"""Predicted waits keep their word on generated queues, and refusals follow from them."""

import random

import pytest

from admission.queues import coverage
from admission.scenarios import SCENARIOS
from inferry.admission.calibration import HIGHEST, Threshold
from inferry.admission.rates import NOTHING, Capacity, Work
from inferry.admission.waits import Ahead, Wait, WaitModel, infeasible
from inferry.domain.errors import DeadlineInfeasible
from inferry.domain.jobs import DEFAULT_LANES, Lane
from support.builders import a_job

ONE = Work(1, 100, 100)
# Not the seeds that the steps of the calibration were chosen on (0 to 4).
SEEDS = range(100, 105)


def queued(p0: float = 0, p1: float = 0, p2: float = 0) -> Ahead:
    return Ahead(tuple(Work(jobs, jobs * 100, jobs * 100) for jobs in (p0, p1, p2)))


def a_model(per_s: float = 10.0, lane: Lane = Lane.P1) -> WaitModel:
    """One that has seen jobs of `lane` admitted at this rate, each after a wait."""
    model = WaitModel(DEFAULT_LANES)
    for number in range(200):
        model.observe_admitted(lane, ONE, 5.0, number / per_s)
    return model


@pytest.mark.parametrize("name", SCENARIOS)
def test_nine_in_ten_jobs_wait_no_longer_than_the_p90_they_were_told(name: str) -> None:
    judged = held = 0.0
    for seed in SEEDS:
        outcomes = SCENARIOS[name](random.Random(seed))
        for lane in {one.lane for one in outcomes}:
            jobs, part = coverage(outcomes, lane)
            assert jobs > 200
            assert 0.85 <= part <= 0.96, f"seed {seed}, {lane.name}: {part:.3f} of {jobs}"
            judged += jobs
            held += jobs * part
    assert 0.87 <= held / judged <= 0.93


@pytest.mark.parametrize("name", ["steady", "load_steps"])
def test_the_median_is_one_and_the_p90_is_no_mere_upper_bound(name: str) -> None:
    outcomes = [one for one in SCENARIOS[name](random.Random(7)) if one.counts]
    below = sum(one.actual_s <= one.predicted.p50_s for one in outcomes) / len(outcomes)
    assert 0.42 <= below <= 0.62
    ratios = sorted((one.predicted.p90_s + 0.05) / (one.predicted.p50_s + 0.05) for one in outcomes)
    assert ratios[len(ratios) // 2] < 3


def test_a_job_that_finds_room_waits_for_nobody() -> None:
    wait = a_model().predict(Lane.P1, ONE, Ahead(has_room=True), 21.0)
    assert wait.p90_s < 0.05


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    wait = WaitModel(DEFAULT_LANES).predict(Lane.P1, ONE, queued(p1=500), 0.0)
    assert wait.p90_s < 0.05
    assert infeasible(a_job(deadline=1.0), wait, 0.0, 0.0) is None


def test_the_wait_is_what_is_ahead_over_the_rate() -> None:
    wait = a_model(per_s=10.0).predict(Lane.P1, ONE, queued(p1=99), 20.0)
    assert wait.p50_s == pytest.approx(10.0, rel=0.05)
    assert wait.p90_s > wait.p50_s


def test_higher_lanes_are_waited_for_and_lower_ones_only_as_far_as_they_are_owed() -> None:
    model = a_model()
    alone, behind, before = (
        model.predict(Lane.P1, ONE, ahead, 20.0).p50_s
        for ahead in (queued(p1=20), queued(p0=20, p1=20), queued(p1=20, p2=500))
    )
    assert behind == pytest.approx(2 * alone, rel=0.1)
    assert alone < before < 1.1 * alone


def test_a_lane_with_a_share_is_served_however_busy_the_lanes_above_are() -> None:
    model = a_model(lane=Lane.P0)  # which took all there was
    wait = model.predict(Lane.P2, ONE, queued(p0=10_000, p2=9), 20.0)
    assert wait.p50_s == pytest.approx(10 / (10 * 0.05), rel=0.1)


def test_idle_time_is_no_measurement_of_capacity() -> None:
    capacity = Capacity()
    for number in range(100):
        capacity.admitted(ONE, 0.0, number * 60.0)
    assert not capacity.is_known
    capacity.admitted(ONE, 0.5, 6000.0)
    assert capacity.jobs_per_s == pytest.approx(2.0)


def test_the_currency_that_predicts_is_the_one_that_counts() -> None:
    model = a_model()
    job = Work(1, 100, 10_000)  # many output tokens, which cost nothing on this worker
    first = model.predict(Lane.P1, job, queued(p1=9), 20.0)
    for _ in range(200):
        model.observe_wait(model.predict(Lane.P1, job, queued(p1=9), 20.0), 1.0)
    last = model.predict(Lane.P1, job, queued(p1=9), 20.0)
    assert abs(last.center_s - 1.0) < 0.3 * abs(first.center_s - 1.0)


def test_a_refused_job_is_sent_away_for_as_long_as_the_backlog_takes() -> None:
    model = a_model()
    whole = model.retry_after(Lane.P1, ONE, queued(p1=200), 20.0)
    assert 15 <= whole <= 60
    assert model.retry_after(Lane.P1, ONE, queued(p1=200), 20.0, within_s=10.0) < whole
    assert model.retry_after(Lane.P1, ONE, Ahead(has_room=True), 20.0) == 1.0
    assert model.retry_after(Lane.P1, ONE, queued(p1=10**9), 20.0) == 120.0


def test_a_job_that_would_miss_its_deadline_is_refused_with_the_reason_and_a_time() -> None:
    refusal = infeasible(a_job(deadline=3.0), Wait(4.0, 6.0), 0.5, 1.0)
    assert isinstance(refusal, DeadlineInfeasible)
    assert (refusal.status, refusal.code, refusal.retryable) == (408, "deadline_infeasible", True)
    assert refusal.retry_after_s == pytest.approx(2.5)
    assert "4500 ms" in refusal.message
    assert "2000 ms" in refusal.message


def test_a_job_that_can_make_it_or_has_no_deadline_is_let_in() -> None:
    assert infeasible(a_job(deadline=5.5), Wait(4.0, 6.0), 0.5, 1.0) is None
    assert infeasible(a_job(deadline=None), Wait(4000.0, 6000.0), 0.5, 1.0) is None


def test_one_burst_of_surprises_moves_a_threshold_by_a_bounded_amount() -> None:
    threshold = Threshold(0.9, 1.0)
    for _ in range(100):
        threshold.learn(True, 1.0)
    before = threshold.value
    for _ in range(50):
        threshold.learn(False, 0.25)
    assert before < threshold.value < before + 2
    for _ in range(100_000):
        threshold.learn(False, 1.0)
    assert threshold.value == HIGHEST


def test_the_record_of_the_p90_can_be_read() -> None:
    model = WaitModel(DEFAULT_LANES)
    for actual in (0.5, 0.5, 0.5, 2.0):
        model.observe_wait(Wait(0.4, 1.0, Lane.P0), actual)
    model.observe_wait(Wait(0.0, 0.01, Lane.P0), 5.0)  # told less than the floor: not judged
    assert model.coverage(Lane.P0).jobs == 4
    assert model.coverage(Lane.P0).within == pytest.approx(0.75)
    assert model.coverage(Lane.P1).jobs == 0


def test_work_adds_up_in_every_currency() -> None:
    assert NOTHING.plus(ONE).plus(ONE) == Work(2, 200, 200)
