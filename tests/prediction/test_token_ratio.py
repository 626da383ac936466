"""Counts that are learned from what engines report."""

from inferry.domain.jobs import Estimate
from inferry.prediction import token_ratio
from inferry.prediction.token_ratio import TokenRatios


def test_before_the_first_report_the_default_ratio_is_used() -> None:
    assert TokenRatios().estimate("m", None, 400) == Estimate(1, 100, 464)


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


def test_the_number_of_ratios_is_bounded() -> None:
    ratios = TokenRatios()
    for number in range(token_ratio.MAX_KEYS + 100):
        ratios.learn("m", f"template-{number}", 10, 5)
    assert len(ratios._ratios) <= token_ratio.MAX_KEYS + 1
