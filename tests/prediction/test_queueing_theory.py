"""The calculators against known values and against small simulations."""

import heapq
import random
from collections.abc import Callable
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.prediction import queueing_theory as q


def simulated_waits(gap: Callable[[], float], service: Callable[[], float], workers: int, jobs: int) -> list[float]:
    free, now, waits = [0.0] * workers, 0.0, []
    for _ in range(jobs):
        now += gap()
        start = max(now, heapq.heappop(free))
        waits.append(start - now)
        heapq.heappush(free, start + service())
    return waits[jobs // 10 :]


def test_erlang_c_has_its_textbook_values() -> None:
    assert q.erlang_c(1, 0.8) == pytest.approx(0.8)
    assert q.erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert q.erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)
    assert q.erlang_c(5, 0.0) == 0.0
    assert q.erlang_c(5, 5.0) == 1.0


def test_one_worker_waits_as_the_formulas_of_mm1_and_md1_say() -> None:
    assert q.mmc_wait(0.8, 1.0) == pytest.approx(4.0)
    assert q.ggc_wait(0.8, 1.0, 1, 1.0, 0.0) == pytest.approx(2.0)
    assert q.wait_quantile(0.9, 0.8, 1.0) == pytest.approx(5 * log(8))


def test_a_queue_that_cannot_keep_up_waits_for_ever() -> None:
    assert q.mmc_wait(2, 1.0, 2) == q.ggc_wait(3, 1.0, 2) == q.wait_quantile(0.5, 3, 1.0, 2) == inf


def test_the_quantile_of_mmc_agrees_with_a_simulation() -> None:
    # Waits in a busy queue depend on each other, so one run is off by a tenth; ten of them are not.
    waits: list[float] = []
    rng = random.Random(1)
    for _ in range(10):
        waits += simulated_waits(lambda: rng.expovariate(3.2), lambda: rng.expovariate(1), 4, 40_000)
    waits.sort()
    assert sum(waits) / len(waits) == pytest.approx(q.mmc_wait(3.2, 1.0, 4), rel=0.08)
    assert waits[len(waits) * 9 // 10] == pytest.approx(q.wait_quantile(0.9, 3.2, 1.0, 4), rel=0.08)


def test_allen_and_cunneen_agree_with_a_simulation_of_spread_service_times() -> None:
    rng, sigma = random.Random(2), 1.0
    cv = (2.718281828**sigma - 1) ** 0.5
    service = lambda: rng.lognormvariate(-(sigma**2) / 2, sigma)  # noqa: E731 - mean 1
    waits = simulated_waits(lambda: rng.expovariate(3.2), service, 4, 80_000)
    assert sum(waits) / len(waits) == pytest.approx(q.ggc_wait(3.2, 1.0, 4, 1.0, cv), rel=0.2)


def test_the_utilisation_for_a_wait_is_where_the_wait_is_that() -> None:
    assert q.utilisation_for_wait(4.0) == pytest.approx(0.8)
    assert q.utilisation_for_wait(4.0, service_cv=0.0) > 0.85
    assert q.utilisation_for_wait(0.25, workers=16) == pytest.approx(0.874, abs=0.001)


@given(st.floats(0.1, 50), st.floats(0.01, 5), st.floats(0.01, 10), st.floats(0.5, 3))
def test_the_workers_needed_meet_the_target_and_one_fewer_would_not(
    rate: float, service: float, promise: float, cv: float
) -> None:
    workers = q.workers_needed(rate, service, promise, arrival_cv=cv)
    assert q.wait_quantile(0.9, rate, service, workers, cv) <= promise
    assert q.utilisation(rate, service, workers) <= 0.8 + 1e-6
    fewer = workers - 1
    if fewer:
        too_busy = q.utilisation(rate, service, fewer) > 0.8 - 1e-6
        assert too_busy or q.wait_quantile(0.9, rate, service, fewer, cv) > promise


def test_a_fleet_nobody_could_buy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(q, "MAX_WORKERS", 10)
    with pytest.raises(ValueError, match="more than 10 workers"):
        q.workers_needed(8, 1.0, 0.0, level=0.999999)


def test_the_time_to_hold_for_a_batch_is_the_time_the_others_take_to_come() -> None:
    assert q.fill_wait(100, 1) == 0
    assert q.fill_wait(100, 11) == pytest.approx(0.1)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_latency_of_a_batch_agrees_with_a_simulation(size: int) -> None:
    rng = random.Random(size)
    rate, fixed, each = 100.0, 0.02, 0.002
    now = free = total = 0.0
    batches = 8000
    for _ in range(batches):
        arrivals = []
        for _ in range(size):
            now += rng.expovariate(rate)
            arrivals.append(now)
        free = max(free, now) + fixed + size * each
        total += sum(free - at for at in arrivals)
    assert total / batches / size == pytest.approx(q.batch(rate, size, fixed, each).mean_s, rel=0.1)


def test_the_best_batch_beats_its_neighbours_and_keeps_up() -> None:
    best = q.best_batch(400, 0.008, 0.0004)
    assert best is not None
    assert best.utilisation < 1
    for size in (best.size - 1, best.size + 1):
        assert q.batch(400, size, 0.008, 0.0004).mean_s >= best.mean_s
    assert q.best_batch(400, 0.008, 0.0025) is None


def test_the_largest_batch_within_a_target_is_the_largest() -> None:
    choice = q.largest_batch(400, 0.008, 0.0004, 0.06)
    assert choice is not None
    assert choice.worst_s <= 0.06 < q.batch(400, choice.size + 1, 0.008, 0.0004).worst_s
    assert q.largest_batch(400, 0.008, 0.0004, 0.001) is None
