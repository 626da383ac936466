"""The model card and the README say what the results file says, and the results are those of the bundled weights."""

from typing import Any

import pytest

from benchmarks import triage, triage_page
from inferry.engine.bundled import BUNDLED_DIRECTORY
from training.triage.evaluate import TOUR, error_by_frame
from training.triage.grammar import INTENTS, UNSCRIPTED


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return triage_page.stored()


def test_the_results_are_those_of_the_bundled_weights(record: dict[str, Any]) -> None:
    assert record["result"]["model"] == triage.describe(BUNDLED_DIRECTORY)


def test_the_page_is_what_the_results_say(record: dict[str, Any]) -> None:
    assert triage_page.PAGE.read_text() == triage_page.page(record, triage_page.stored_reading())


def test_the_readme_has_the_answers_of_the_results(record: dict[str, Any]) -> None:
    readme = triage_page.README.read_text()
    assert triage_page.with_tour(readme, record) == readme
    assert triage_page.tour(record) in readme
    assert all(prompt in readme for prompt in TOUR)


def test_the_replies_that_were_read_are_those_of_the_bundled_weights(record: dict[str, Any]) -> None:
    reading = triage_page.stored_reading()
    assert reading["weights_sha256"] == record["result"]["model"]["weights_sha256"]
    for path in UNSCRIPTED:
        assert all(1 <= int(number) <= 20 for number in reading[path.stem])


def test_the_standard_error_counts_frames_and_not_texts() -> None:
    """Two frames of 50 texts each, all right and all wrong: two observations and not a hundred."""
    hits = [True] * 50 + [False] * 50
    by_text = error_by_frame(hits, [{str(text)} for text in range(100)])
    assert by_text == pytest.approx(0.05, rel=0.01)
    assert error_by_frame(hits, [{"right" if hit else "wrong"} for hit in hits]) == pytest.approx(0.5)


def test_the_card_says_what_its_standard_error_counts(record: dict[str, Any]) -> None:
    reading = triage_page.stored_reading()
    without = {key: value for key, value in record["result"]["classify"].items() if key != "standard_error"}
    for classify, says in (
        (without, "points by ticket, which is too small"),
        ({**without, "standard_error": 0.0123}, "standard error 1.2 points, by frame"),
    ):
        assert says in triage_page.page({**record, "result": {**record["result"], "classify": classify}}, reading)


def test_a_missed_goal_is_stated(record: dict[str, Any]) -> None:
    for accuracy, outcome in ((0.884, "is 1.6 points below the goal"), (0.9, "meets the goal")):
        classify = {**record["result"]["classify"], "accuracy": accuracy}
        result = {**record["result"], "classify": classify, "meets_goal": accuracy >= triage.GOAL}
        page = triage_page.page({**record, "result": result}, triage_page.stored_reading())
        assert "The goal is the right class for 90.0 % of the held-out tickets." in page
        assert f"This {outcome}." in page


def test_at_least_85_percent_of_held_out_tickets_are_classified_right(record: dict[str, Any]) -> None:
    """A goal that is missed is stated in the model card."""
    classify = record["result"]["classify"]
    assert classify["accuracy"] >= 0.85
    assert record["result"]["meets_goal"] == (classify["accuracy"] >= triage.GOAL)
    assert set(classify["by_intent"]) == set(INTENTS)
    assert sum(one["documents"] for one in classify["by_intent"].values()) == classify["documents"]


def test_every_unscripted_ticket_has_a_class_and_a_reply(record: dict[str, Any]) -> None:
    page = triage_page.PAGE.read_text()
    for path in UNSCRIPTED:
        listed = record["result"][path.stem]["tickets"]
        assert len(listed) == 20
        for one in listed:
            assert one["answer"] in INTENTS
            assert one["reply"].strip()
            assert " ".join(one["ticket"].split()).replace("<", "&lt;").replace("|", "\\|") in page
