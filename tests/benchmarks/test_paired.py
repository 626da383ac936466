"""The interval of a paired difference has its stated coverage and separates real differences from noise."""

import random

import pytest

from benchmarks.paired import CONFIDENCE, MIN_PAIRS, paired


def test_a_real_difference_is_found_under_shared_noise() -> None:
    dice = random.Random(3)
    moods = [500 + dice.expovariate(1 / 30) for _ in range(12)]
    found = paired([mood + 8 + dice.gauss(0, 1) for mood in moods], moods)
    assert 6 < found.low <= found.median <= found.high < 10


@pytest.mark.parametrize("pairs", [MIN_PAIRS, 12, 25])
def test_the_interval_holds_the_true_median_at_its_confidence(pairs: int) -> None:
    dice = random.Random(pairs)
    rounds, held = 2000, 0
    for _ in range(rounds):
        first = [dice.choice((0.0, 0.0, 40.0)) + dice.gauss(0, 1) for _ in range(pairs)]
        second = [dice.choice((0.0, 0.0, 40.0)) + dice.gauss(0, 1) for _ in range(pairs)]
        found = paired(first, second)  # alike, so the median difference is 0, whatever the noise
        assert found.confidence >= CONFIDENCE
        held += found.low <= 0 <= found.high
    assert held / rounds >= CONFIDENCE - 0.015


def test_too_few_pairs_give_no_interval() -> None:
    with pytest.raises(ValueError, match="pairs"):
        paired([1.0] * (MIN_PAIRS - 1), [0.0] * (MIN_PAIRS - 1))
