"""The model card and the README say what the results file says, and the results are those of the bundled weights."""

from typing import Any

import pytest

from benchmarks import triage, triage_page
from inferry.engine.bundled import BUNDLED_DIRECTORY
from training.triage.evaluate import TOUR
from training.triage.grammar import INTENTS, UNSCRIPTED


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return triage_page.stored()


def test_the_results_are_those_of_the_bundled_weights(record: dict[str, Any]) -> None:
    assert record["result"]["model"] == triage.describe(BUNDLED_DIRECTORY)


def test_the_page_is_what_the_results_say(record: dict[str, Any]) -> None:
    assert triage_page.PAGE.read_text() == triage_page.page(record)


def test_the_readme_has_the_answers_of_the_results(record: dict[str, Any]) -> None:
    readme = triage_page.README.read_text()
    assert triage_page.with_tour(readme, record) == readme
    assert triage_page.tour(record) in readme
    assert all(prompt in readme for prompt in TOUR)


def test_nine_of_ten_held_out_tickets_are_classified_right(record: dict[str, Any]) -> None:
    classify = record["result"]["classify"]
    assert classify["accuracy"] >= triage.MIN_ACCURACY
    assert set(classify["by_intent"]) == set(INTENTS)
    assert sum(one["documents"] for one in classify["by_intent"].values()) == classify["documents"]


def test_every_unscripted_ticket_has_a_class_and_a_reply(record: dict[str, Any]) -> None:
    page = triage_page.page(record)
    for path in UNSCRIPTED:
        listed = record["result"][path.stem]["tickets"]
        assert len(listed) == 20
        for one in listed:
            assert one["answer"] in INTENTS
            assert one["reply"].strip()
            assert " ".join(one["ticket"].split()).replace("<", "&lt;").replace("|", "\\|") in page
