"""How many workers a group should have, in virtual time."""

import random

import pytest

from inferry.prediction.scaling import (
    OUTPUT_TOKEN_WEIGHT,
    PRIOR_S_PER_UNIT,
    GroupDemand,
    GroupScaler,
    ScalingPolicy,
    WorkCost,
    needed_workers,
)

POLICY = ScalingPolicy(target_wait_s=10.0, utilization=0.8, scale_down_after_s=60.0)


def demand(
    workers: int = 1,
    in_use: float = 0.0,
    waiting_s: float = 0.0,
    min_workers: int = 1,
    max_workers: int | None = 8,
    waiting_jobs: int | None = None,
) -> GroupDemand:
    return GroupDemand(
        workers=workers,
        in_use=in_use,
        waiting_jobs=(1 if waiting_s else 0) if waiting_jobs is None else waiting_jobs,
        waiting_s=waiting_s,
        min_workers=min_workers,
        max_workers=max_workers,
    )


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        (demand(), 1),
        (demand(min_workers=0), 0),
        (demand(min_workers=0, waiting_jobs=1), 1),
        (demand(min_workers=0, in_use=0.01), 1),
        (demand(in_use=0.8), 1),
        (demand(in_use=0.9), 2),
        (demand(in_use=1.6), 2),
        (demand(in_use=0.8, waiting_s=20.0), 3),
        (demand(waiting_s=1000.0), 8),
        (demand(waiting_s=1000.0, max_workers=None), 100),
        (demand(min_workers=3), 3),
    ],
)
def test_workers_needed_for_running_and_waiting_work(given: GroupDemand, needed: int) -> None:
    assert needed_workers(given, POLICY) == needed


def test_advice_rises_at_once_and_falls_when_fewer_have_been_enough() -> None:
    scaler = GroupScaler("g", POLICY)
    assert scaler.advise(demand(), 0.0).desired == 1
    assert scaler.advise(demand(waiting_s=30.0), 1.0).desired == 3
    for second in range(2, 61):
        advice = scaler.advise(demand(workers=3), float(second))
        assert (advice.desired, advice.needed) == (3, 1)
        assert advice.reason == "3 workers were needed within the last 60 s"
    assert scaler.advise(demand(workers=3), 61.0).desired == 1


def test_workers_that_were_found_are_not_stopped_at_once() -> None:
    scaler = GroupScaler("g", POLICY)
    scaler.assume_needed(4, 0.0)
    assert scaler.advise(demand(workers=0), 1.0).desired == 4
    assert scaler.advise(demand(workers=4), 60.0).desired == 1


def test_the_present_workers_count_as_needed_before_the_first_advice() -> None:
    assert GroupScaler("g", POLICY).advise(demand(workers=5), 0.0).desired == 5


def test_a_noisy_load_does_not_make_the_advice_flap() -> None:
    """A load around the boundary between two and three workers: the advice changes once."""
    scaler, rng = GroupScaler("g", POLICY), random.Random(7)
    seen = [scaler.advise(demand(in_use=1.6 + rng.uniform(-0.3, 0.3)), float(second)).desired for second in range(3600)]
    assert set(seen[30:]) == {3}


def test_between_two_falls_lies_the_window() -> None:
    scaler, rng = GroupScaler("g", POLICY), random.Random(11)
    load, before, fell_at = 0.0, 0, -1e9
    for second in range(7200):
        load = min(6.0, max(0.0, load + rng.uniform(-0.5, 0.5)))
        advice = scaler.advise(demand(in_use=load), float(second))
        assert advice.desired >= advice.needed
        if advice.desired < before:
            # A fall follows the largest need of the window, so the need was lower for that long.
            fell_at = second
        elif advice.desired > before:
            assert advice.desired == advice.needed
        before = advice.desired
    assert fell_at > 0


def test_a_group_falls_to_zero_only_without_work() -> None:
    scaler = GroupScaler("g", POLICY)
    assert scaler.advise(demand(in_use=0.2, min_workers=0), 0.0).desired == 1
    assert scaler.advise(demand(min_workers=0), 59.0).desired == 1
    assert scaler.advise(demand(min_workers=0), 60.0).desired == 0
    assert scaler.advise(demand(min_workers=0, waiting_jobs=1), 61.0).desired == 1


def test_limits_that_change_hold_at_once() -> None:
    scaler = GroupScaler("g", POLICY)
    assert scaler.advise(demand(waiting_s=70.0), 0.0).desired == 7
    assert scaler.advise(demand(max_workers=4), 1.0).desired == 4


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (demand(), "the minimum number of workers"),
        (demand(waiting_s=1000.0), "the maximum number of workers"),
        (demand(in_use=1.7), "capacity of 1.70 workers is in use, at most 80% of each worker"),
        (
            demand(in_use=0.5, waiting_s=20.0),
            "20.0 s of engine time waits, to be drained within 10 s; capacity of 0.50 workers is in use",
        ),
    ],
)
def test_advice_names_its_reason(given: GroupDemand, reason: str) -> None:
    assert GroupScaler("g", POLICY).advise(given, 0.0).reason == reason


def test_the_cost_of_work_is_learned_from_busy_time() -> None:
    cost = WorkCost()
    assert cost.seconds(1000, 0) == pytest.approx(1000 * PRIOR_S_PER_UNIT)
    for _ in range(10):
        cost.observe(1.0, 0.5, 100, 100)
    per_unit = 0.5 / (100 + OUTPUT_TOKEN_WEIGHT * 100)
    assert cost.seconds(0, 10) == pytest.approx(10 * OUTPUT_TOKEN_WEIGHT * per_unit)
    cost.observe(3600.0, 0.0, 0, 0)
    assert cost.seconds(0, 10) == pytest.approx(10 * OUTPUT_TOKEN_WEIGHT * per_unit)
    for _ in range(600):
        cost.observe(1.0, 1.0, 100, 100)
    assert cost.seconds(0, 10) == pytest.approx(2 * 10 * OUTPUT_TOKEN_WEIGHT * per_unit, rel=0.01)
