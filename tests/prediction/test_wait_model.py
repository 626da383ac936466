"""Predicted waits keep their word on generated queues, and refusals follow from them."""

import random
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.errors import DeadlineInfeasible
from inferry.domain.lanes import Lane
from inferry.domain.plans import QueuedAhead
from inferry.domain.queue_depth import QueueDepth
from inferry.prediction.calibration import MAX_CORRECTION, ConformalCorrection, ErrorHistogram
from inferry.prediction.drain_rates import DrainRates
from inferry.prediction.wait_model import MAX_RETRY_S, MIN_RETRY_S, _monotone_bounds, deadline_refusal
from inferry.prediction.wait_prediction import WaitPrediction
from prediction.queue_simulation import coverage
from prediction.scenarios import SCENARIOS
from support.builders import a_job
from support.wait_models import DrivenWaitModel

# Not the seeds that the model was made on.
SEEDS = range(100, 105)


def ahead(jobs: int) -> QueuedAhead:
    return QueuedAhead(jobs, jobs * 100, jobs * 100)


def a_model(per_s: float = 10.0, lane: Lane = Lane.P1, seconds: float = 60.0) -> DrivenWaitModel:
    """One that has seen a backlog of `lane` go at this rate, each job after five seconds of waiting."""
    model = DrivenWaitModel()
    waiting: list[WaitPrediction] = []

    def comes(now: float) -> None:
        prediction = model.predict(lane, 100, 100, ahead(len(waiting)), now)
        model.queued(prediction, now)
        waiting.append(prediction)

    for _ in range(int(5 * per_s)):
        comes(0.0)
    for number in range(1, int(seconds * per_s)):
        now = number / per_s
        model.sent(waiting.pop(0), now)
        comes(now)
    for prediction in waiting:
        model.left(prediction, seconds)
    return model


@pytest.mark.parametrize("name", SCENARIOS)
def test_nine_in_ten_jobs_wait_no_longer_than_their_predicted_p90(name: str) -> None:
    judged = held = 0.0
    for seed in SEEDS:
        outcomes = SCENARIOS[name](random.Random(seed))
        for lane in {one.lane for one in outcomes}:
            jobs, part = coverage(outcomes, lane)
            assert jobs > 200
            assert 0.80 <= part <= 0.98, f"seed {seed}, {lane.name}: {part:.3f} of {jobs}"
            judged += jobs
            held += jobs * part
    assert 0.87 <= held / judged <= 0.96


@pytest.mark.parametrize("name", ["steady", "load_steps"])
def test_the_median_is_one_and_the_p90_is_no_mere_upper_bound(name: str) -> None:
    outcomes = [one for one in SCENARIOS[name](random.Random(7)) if one.counts]
    below = sum(one.actual_s <= one.prediction.p50_s for one in outcomes) / len(outcomes)
    assert 0.42 <= below <= 0.62
    ratios = sorted((one.prediction.p90_s + 0.05) / (one.prediction.p50_s + 0.05) for one in outcomes)
    assert ratios[len(ratios) // 2] < 3


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    model = DrivenWaitModel()
    prediction = model.predict(Lane.P1, 100, 100, ahead(500), 0.0)
    assert prediction.p90_s < 0.05
    assert deadline_refusal(model.model, a_job(deadline=1.0), prediction, 0.0) is None


def test_the_wait_is_what_is_ahead_over_the_rate() -> None:
    prediction = a_model(per_s=10.0).predict(Lane.P1, 100, 100, ahead(99), 60.0)
    assert prediction.p50_s == pytest.approx(10.0, rel=0.25)
    assert prediction.p10_s < prediction.p50_s <= prediction.p90_s


def test_arrivals_in_higher_lanes_count_towards_the_wait() -> None:
    """Ten a second are sent. While six of those come for P0, a P2 job sees its queue go at four a second."""
    quiet, busy = DrivenWaitModel(), DrivenWaitModel()
    for model, live_every in ((quiet, None), (busy, 10)):
        waiting: list[WaitPrediction] = []
        for number in range(1200):
            now = number / 20
            lane = Lane.P0 if live_every and number % live_every < 6 else Lane.P2
            prediction = model.predict(lane, 100, 100, QueuedAhead(), now)
            model.queued(prediction, now)
            waiting.append(prediction)
            if number % 2:
                waiting.sort(key=lambda one: (one.lane, one.at))
                model.sent(waiting.pop(0), now + 0.01)
    without, with_live = (model.predict(Lane.P2, 100, 100, ahead(100), 60.0).estimate_s for model in (quiet, busy))
    assert without == pytest.approx(10.0, rel=0.1)
    assert with_live > 2 * without


def test_a_lane_with_a_share_has_a_finite_predicted_wait() -> None:
    """More comes for P0 than can be sent; P2 gets one in twenty."""
    model = DrivenWaitModel()
    live: list[WaitPrediction] = []
    batch = [model.predict(Lane.P2, 100, 100, QueuedAhead(), 0.0) for _ in range(100)]
    for prediction in batch:
        model.queued(prediction, 0.0)
    for number in range(600):
        now = number / 10
        for _ in range(2):
            prediction = model.predict(Lane.P0, 100, 100, QueuedAhead(), now)
            model.queued(prediction, now)
            live.append(prediction)
        model.sent((batch if number % 20 == 19 else live).pop(0), now + 0.05)
    prediction = model.predict(Lane.P2, 100, 100, ahead(len(live) + 9), 60.0)
    assert prediction.estimate_s == pytest.approx(20.0, rel=0.2), "nine batch jobs, whatever is queued above them"


def test_the_wait_is_the_shorter_of_share_and_higher_lanes() -> None:
    depth = QueueDepth()
    drain = DrainRates(depth)
    for number in range(400):
        now = number / 10
        lane = Lane.P2 if number % 4 == 3 else Lane.P1
        depth.add(lane, 100, 100)
        drain.joined(lane, 100, 100, now)
        if number >= 20:
            depth.remove(lane, 100, 100)
            drain.sent(lane, 100, 100, 2.0, now + 0.01)
        drain.update(now + 0.01)
    assert depth.above[Lane.P2] == [15, 1500, 1500]
    assert depth.above[Lane.P1] == [0, 0, 0]
    everybody, own = drain.seconds[Lane.P2][1][0], drain.lane_seconds[Lane.P2][1][0]
    assert own == pytest.approx(0.4, rel=0.1), "2.5 batch jobs go a second"
    assert everybody == pytest.approx(0.4, rel=0.2), "ten go, and 7.5 come above"
    for _ in range(15):
        depth.remove(Lane.P1, 100, 100)
    assert depth.above[Lane.P2] == [0, 0, 0]


def test_horizons_are_weighted_by_their_evidence() -> None:
    factors = [1.0, 4.0, 2.0, 2.0, 2.0, 2.0]
    for evidence, prediction in (
        ([10.0, 1.0, 99.0, 10.0, 10.0, 10.0], 2.02),
        ([10.0, 99.0, 1.0, 10.0, 10.0, 10.0], 3.98),
    ):
        least, most = _monotone_bounds(factors, evidence)
        assert most[1] == least[2] == pytest.approx(prediction * 0.41, rel=0.001)
        assert most[0] == inf
    assert all(a <= b for a, b in pairwise(least))


def test_jobs_that_did_not_wait_do_not_update_the_drain_rate() -> None:
    depth = QueueDepth()
    drain = DrainRates(depth)
    for number in range(100):
        depth.add(Lane.P1, 100, 100)
        drain.joined(Lane.P1, 100, 100, number * 1.0)
        depth.remove(Lane.P1, 100, 100)
        drain.sent(Lane.P1, 100, 100, 0.001, number + 0.001)
        drain.update(number + 0.001)
    assert drain.seconds[Lane.P1] == [(0.0, 0.0, 0.0)] * 3
    depth.add(Lane.P1, 100, 50)
    drain.joined(Lane.P1, 100, 50, 100.0)
    depth.remove(Lane.P1, 100, 50)
    drain.sent(Lane.P1, 100, 50, 0.5, 100.5)
    drain.update(100.5)
    assert drain.seconds[Lane.P1][0] == pytest.approx((0.5, 0.005, 0.01), rel=0.15)


def test_the_currency_that_predicts_is_the_one_that_counts() -> None:
    """Jobs go at ten a second whatever they write; some are said to write a lot."""
    model = a_model()
    for number in range(400):
        now = 60.0 + number / 10
        writes = 10_000 if number % 2 == 0 else 100
        prediction = model.predict(Lane.P1, 100, writes, ahead(9), now)
        model.queued(prediction, now)
        model.sent(prediction, now + 1.0)
    long, short = (model.predict(Lane.P1, 100, output, ahead(9), 101.0).estimate_s for output in (10_000, 100))
    assert long < 2 * short


def test_a_wait_that_is_longer_than_stated_is_learned_from_before_it_ends() -> None:
    model = a_model()
    before = model.predict(Lane.P1, 100, 100, ahead(9), 60.0)
    for number in range(20):
        prediction = model.predict(Lane.P1, 100, 100, ahead(9), 60.0 + number)
        model.queued(prediction, 60.0 + number)
    assert model.predict(Lane.P1, 100, 100, ahead(9), 80.0).p90_s / before.estimate_s > before.p90_s / before.estimate_s


@pytest.mark.parametrize("leaves", [True, False])
def test_a_job_that_leaves_the_queue_teaches_nothing(leaves: bool) -> None:
    model = a_model()
    prediction = model.predict(Lane.P1, 100, 100, ahead(99), 100.0)
    model.queued(prediction, 100.0)
    judged = model.coverage(Lane.P1).jobs
    if leaves:
        model.left(prediction, 101.0)
    later = model.predict(Lane.P0, 100, 100, QueuedAhead(), 200.0)
    model.queued(later, 200.0)
    assert model.coverage(Lane.P1).jobs == judged + (not leaves)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(list(Lane)), st.floats(0, 3), st.floats(0, 30), st.integers(0, 50)), max_size=120
    ),
    queue=st.integers(0, 10_000),
    longer=st.integers(0, 10_000),
)
def test_predictions_are_never_negative_ordered_and_grow_with_what_is_ahead(
    steps: list[tuple[Lane, float, float, int]], queue: int, longer: int
) -> None:
    model = DrivenWaitModel()
    now = 0.0
    open_jobs: list[WaitPrediction] = []
    for lane, gap, patience, before in steps:
        now += gap
        prediction = model.predict(lane, 50, 20, ahead(before), now)
        model.queued(prediction, now)
        open_jobs.append(prediction)
        while open_jobs and now - open_jobs[0].at > patience:
            model.sent(open_jobs.pop(0), now)
    for lane in Lane:
        short, long = (model.predict(lane, 50, 20, ahead(jobs), now) for jobs in (queue, queue + longer))
        for prediction in (short, long):
            assert 0 <= prediction.p10_s <= prediction.p50_s <= prediction.p90_s < 1e6
            for covered in (None, 0.0, 5.0, 1e9):
                assert MIN_RETRY_S <= model.retry_after(prediction, covered) <= MAX_RETRY_S
        assert long.p10_s >= short.p10_s
        assert long.p50_s >= short.p50_s
        assert long.p90_s >= short.p90_s


def test_a_refused_job_is_sent_away_for_as_long_as_the_backlog_takes() -> None:
    model = a_model()
    prediction = model.predict(Lane.P1, 100, 100, ahead(200), 60.0)
    assert model.retry_after(prediction) == pytest.approx(prediction.p50_s)
    assert model.retry_after(prediction, 0.9 * prediction.p50_s) < model.retry_after(prediction, 0.0)
    assert model.retry_after(model.predict(Lane.P1, 100, 100, QueuedAhead(), 60.0)) == MIN_RETRY_S
    assert model.retry_after(model.predict(Lane.P1, 100, 100, ahead(10**9), 60.0)) == MAX_RETRY_S


def test_a_job_that_would_expire_in_the_queue_is_refused_with_the_reason_and_a_time() -> None:
    model = a_model()
    prediction = model.predict(Lane.P1, 100, 100, ahead(200), 60.0)
    refusal = deadline_refusal(model.model, a_job(deadline=62.0), prediction, 60.0)
    assert isinstance(refusal, DeadlineInfeasible)
    assert (refusal.status, refusal.code, refusal.retryable) == (408, "deadline_infeasible", False)
    assert refusal.retry_after_s == model.retry_after(prediction, 2.0)
    assert refusal.predicted_wait_s == prediction.p50_s
    assert "2000 ms" in refusal.message


def test_a_job_that_may_make_it_or_has_no_deadline_is_let_in() -> None:
    model = a_model()
    prediction = model.predict(Lane.P1, 100, 100, ahead(200), 60.0)
    assert deadline_refusal(model.model, a_job(deadline=60.0 + prediction.p10_s + 0.01), prediction, 60.0) is None
    assert prediction.p10_s < prediction.p50_s
    assert deadline_refusal(model.model, a_job(deadline=None), prediction, 60.0) is None


def test_a_job_with_nothing_ahead_is_let_in_however_slow_the_last_queue_was() -> None:
    model = a_model(per_s=0.5)
    prediction = model.predict(Lane.P1, 100, 100, QueuedAhead(), 60.0)
    assert prediction.p10_s > 0.5
    assert deadline_refusal(model.model, a_job(deadline=60.5), prediction, 60.0) is None
    assert deadline_refusal(model.model, a_job(deadline=60.0), prediction, 60.0) is not None


def test_a_backlog_that_drains_at_once_moves_the_correction_by_a_bounded_amount() -> None:
    correction = ConformalCorrection()
    for _ in range(300):
        correction.record(False, 60.0, 1.0)
    assert 1.0 < correction.factor < 1.3
    for number in range(10_000):
        correction.record(False, 1.0, float(number))
    assert correction.factor == pytest.approx(2.718281828**MAX_CORRECTION)


def test_quantiles_of_errors_follow_what_is_seen() -> None:
    errors = ErrorHistogram(0.0, 0.5)
    draw = random.Random(1)
    for number in range(2000):
        errors.add(draw.gauss(0.7, 0.2), 0.5, float(number))
    assert errors.p50 == pytest.approx(2.01, rel=0.05)
    assert errors.p90 == pytest.approx(2.60, rel=0.06)
    assert errors.p10 == pytest.approx(1.56, rel=0.06)


def test_the_record_of_the_p90_can_be_read() -> None:
    model = a_model()
    record = model.coverage(Lane.P1)
    assert record.jobs > 100
    assert 0.5 < record.covered <= 1.0
    assert model.coverage(Lane.P0).jobs == 0
