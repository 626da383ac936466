"""Which of several stop strings ends a text, where several are complete at once."""

import pytest

from inferry.streams.stop_strings import StopStrings


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (("bcd", "c"), "abcde", "ab"),  # the shorter one is complete first, though it begins later
        (("c", "bcd"), "abcde", "ab"),
        (("bc", "c"), "abcd", "a"),  # both end together: the longer
        (("c", "bc"), "abcd", "a"),
        (("d", "b"), "abcd", "a"),
    ],
)
def test_of_stop_strings_that_come_together_the_one_that_is_complete_first_counts(
    stops: tuple[str, ...], text: str, kept: str
) -> None:
    assert StopStrings(stops).push(text) == (kept, True)
    slowly = StopStrings(stops)
    assert "".join(slowly.push(letter)[0] for letter in text) == kept


def test_an_empty_stop_string_stops_nothing() -> None:
    stops = StopStrings(("", "x"))
    assert stops.push("abc") == ("abc", False)
    assert stops.push("x") == ("", True)


def test_all_but_the_last_letter_of_a_stop_string_is_held_back() -> None:
    stops = StopStrings(("stop",))
    assert stops.push("go sto") == ("go ", False)
    assert stops.push("w") == ("stow", False)
    assert stops.finish() == ""
