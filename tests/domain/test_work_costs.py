"""What a unit of an engine's work costs, learned from observed time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.work_costs import PRIOR_COSTS, WorkCosts
from inferry.domain.work_prices import decode_s

TRUE = (0.006, 3e-5, 4e-5, 5e-8)


def work(rng: random.Random) -> tuple[float, float, float, float]:
    steps = rng.randint(20, 60)
    tokens = steps * rng.randint(1, 60)
    return float(steps), float(tokens), float(rng.randint(0, 20_000)), float(tokens * rng.randint(100, 8000))


@pytest.mark.parametrize(("is_exact", "error"), [(True, 0.05), (False, 0.3)])
def test_varied_work_reveals_the_costs(is_exact: bool, error: float) -> None:
    costs, rng = WorkCosts(is_exact=is_exact), random.Random(1)
    for _ in range(400):
        one = work(rng)
        costs.add(0.5, sum(a * b for a, b in zip(TRUE, one, strict=True)), *one)
    costs.solve()
    assert (costs.base_s, costs.prompt_s, costs.kv_s) == pytest.approx((TRUE[0], TRUE[2], TRUE[3]), rel=error)


def test_work_that_is_always_alike_reveals_only_its_sum_and_the_prior_splits_it() -> None:
    costs = WorkCosts(is_exact=True)
    for _ in range(100):
        costs.add(1.0, 1.0, 100.0, 1000.0, 5000.0, 1e6)
    costs.solve()
    assert 100 * costs.base_s + decode_s(costs, 1000, 1000) + 5000 * costs.prompt_s == pytest.approx(1.0, rel=0.01)
    assert costs.base_s / costs.prompt_s == pytest.approx(PRIOR_COSTS[0], rel=0.05)


def test_without_observations_the_costs_have_the_calibrated_ratios() -> None:
    costs = WorkCosts()
    costs.solve()
    assert costs.base_s / costs.prompt_s == pytest.approx(PRIOR_COSTS[0])


@given(st.lists(st.tuples(st.floats(0, 10), *[st.floats(0, 1e6)] * 4), max_size=20))
def test_costs_are_never_negative(observed: list[tuple[float, float, float, float, float]]) -> None:
    costs = WorkCosts(is_exact=True)
    for busy_s, *counts in observed:
        costs.add(0.5, busy_s, *counts)
    costs.solve()
    assert min(costs.base_s, costs.token_s, costs.prompt_s, costs.kv_s) >= 0
