"""Intervals, and the threshold that promises an agreement."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.proportions import choose_threshold, exact_lower, wilson


def test_known_intervals() -> None:
    assert list(wilson(95, 100)) == pytest.approx([0.8882, 0.9785], abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert exact_lower(59, 59) == pytest.approx(0.05 ** (1 / 59), abs=1e-6)
    assert exact_lower(95, 100) == pytest.approx(0.8977, abs=1e-4)
    assert exact_lower(0, 10) == 0.0


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_contain_the_share(counts: tuple[int, int]) -> None:
    hits, total = counts
    low, high = wilson(hits, total)
    assert 0.0 <= low <= hits / total + 1e-12
    assert hits / total - 1e-12 <= high <= 1.0
    assert exact_lower(hits, total) <= hits / total + 1e-9


def test_too_few_pairs_promise_nothing() -> None:
    assert choose_threshold([], 0.95) is None
    assert choose_threshold([(0.0, True)] * 116, 0.95) is None
    found = choose_threshold([(0.0, True)] * 117, 0.95)
    assert found is not None
    assert found.accepted == 117


def test_the_threshold_ends_where_the_bound_does() -> None:
    sure = [(-0.1 - index / 10_000, True) for index in range(400)]
    unsure = [(-1.0 - index / 10_000, index % 2 == 0) for index in range(400)]
    found = choose_threshold([*unsure, *sure], 0.95)
    assert found is not None
    assert found.score > -1.1
    assert found.lower_bound >= 0.95
    assert found.agreed / found.accepted >= 0.95


def test_a_promise_is_broken_in_few_samples() -> None:
    """The chance of agreement falls with the score; the true agreement above a threshold is computed exactly."""
    random, broken, made = Random(3), 0, 0
    for _ in range(100):
        pairs = [(score := random.random(), random.random() < 0.8 + 0.2 * score**0.5) for _ in range(600)]
        found = choose_threshold(pairs, 0.93)
        if found is not None:
            made += 1
            above = 1 - found.score
            broken += 0.8 + 0.2 * (1 - found.score**1.5) / 1.5 / above < 0.93
    assert made > 30
    assert broken <= 8, "5 are expected at most; samples vary"
