"""Counts that are learned from what engines report."""

from hypothesis import given
from hypothesis import strategies as st

from inferry.dispatch import tokens
from inferry.dispatch.tokens import CachedShares, TokenRatios
from inferry.domain.jobs import Estimate


def test_before_anything_is_reported_a_guess_is_made_and_nothing_is_cached() -> None:
    assert TokenRatios().estimate("m", None, 400) == Estimate(1, 100, 464)
    assert CachedShares().estimate("m", "a", "run", Estimate.exactly(100)).expected == 0


def test_the_ratio_follows_what_is_reported() -> None:
    ratios = TokenRatios()
    for _ in range(200):
        ratios.learn("m", None, 1000, 500)
    assert ratios.estimate("m", None, 400).expected == 200
    assert ratios.estimate("other", None, 400).expected == 100


def test_a_template_without_history_leans_on_its_model() -> None:
    ratios = TokenRatios()
    ratios.learn("m", "t", 1000, 500)
    assert ratios.estimate("m", "new", 400).expected == 200


def test_later_calls_of_a_run_are_told_apart_from_its_first() -> None:
    cached = CachedShares()
    for run in range(50):
        cached.learn("m", "a", f"run-{run}", 1000, 200)
        cached.learn("m", "a", f"run-{run}", 1000, 900)
    prompt = Estimate.exactly(1000)
    assert cached.estimate("m", "a", "new", prompt).expected == 200
    assert cached.estimate("m", "a", "run-7", prompt).expected == 900


def test_tenants_share_no_expectations() -> None:
    cached = CachedShares()
    cached.learn("m", "a", "run", 1000, 900)
    assert cached.estimate("m", "b", "run", Estimate.exactly(1000)).expected == 0


def test_what_is_remembered_is_bounded() -> None:
    cached, ratios = CachedShares(), TokenRatios()
    for number in range(tokens.MOST_RUNS + 100):
        cached.learn("m", f"tenant-{number}", "run", 10, 5)
        ratios.learn("m", f"template-{number}", 10, 5)
    assert len(cached._runs) <= tokens.MOST_RUNS
    assert len(cached._shares) <= tokens.MOST_KEYS
    assert len(ratios._ratios) <= tokens.MOST_KEYS + 1


@given(st.integers(0, 10**6), st.integers(-5, 10**6), st.integers(0, 10**6))
def test_an_estimate_is_never_out_of_order(size: int, prompt: int, cached: int) -> None:
    shares = CachedShares()
    shares.learn("m", "a", "run", prompt, cached)
    known = Estimate.exactly(max(1, size))
    guess = shares.estimate("m", "a", "run", known)
    assert 0 <= guess.low <= guess.expected <= guess.high
