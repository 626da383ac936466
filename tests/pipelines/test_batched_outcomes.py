"""What each item of a batch gets: results, own errors, bisection, wrong lengths."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.pipelines.batched.outcomes import BatchResultError, OnError, call_all


class Recorded:
    """A function that raises for a batch with a bad item, and records its calls."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad = set(bad)
        self.calls: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.calls.append(items)
        if worst := self.bad.intersection(items):
            raise ValueError(min(worst))
        return [10 * item for item in items]

    def outcomes(self, items: int, on_error: OnError = "bisect") -> list[Any]:
        return call_all(self, "recorded", list(range(items)), on_error)


def described(outcomes: Sequence[Any]) -> list[Any]:
    return [repr(outcome) if isinstance(outcome, Exception) else outcome for outcome in outcomes]


def test_a_batch_without_errors_is_one_call() -> None:
    function = Recorded()
    assert function.outcomes(4) == [0, 10, 20, 30]
    assert len(function.calls) == 1


def test_one_bad_item_of_64_fails_alone_after_12_further_calls() -> None:
    function = Recorded(bad=[17])
    outcomes = function.outcomes(64)
    assert described(outcomes) == [10 * item if item != 17 else "ValueError(17)" for item in range(64)]
    assert len(function.calls) == 1 + 12


@given(st.integers(1, 33), st.sets(st.integers(0, 32)))
def test_exactly_the_bad_items_fail_each_with_its_own_error(items: int, bad: set[int]) -> None:
    function = Recorded(bad=sorted(bad))
    expected = [10 * item if item not in bad else f"ValueError({item})" for item in range(items)]
    assert described(function.outcomes(items)) == expected
    assert len(function.calls) <= 2 * items - 1


def test_fail_calls_the_function_once_and_gives_every_item_the_error() -> None:
    function = Recorded(bad=[1])
    assert described(function.outcomes(3, "fail")) == ["ValueError(1)"] * 3
    assert len(function.calls) == 1


def test_an_exception_among_the_results_belongs_to_its_item() -> None:
    error = ValueError("one")
    assert call_all(lambda items: [1, error, 3], "f", [0, 0, 0], "bisect") == [1, error, 3]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], "f returned 1 results for 2 items"),
        ([1, 2, 3], "f returned 3 results for 2 items"),
        (None, "f returned a NoneType instead of a list for 2 items"),
        ("ab", "f returned a str instead of a list for 2 items"),
        (iter([1, 2]), "f returned a list_iterator instead of a list for 2 items"),
    ],
)
def test_a_wrong_number_of_results_is_a_clear_error_and_is_not_retried(returned: Any, message: str) -> None:
    calls = []

    def function(items: list[int]) -> Any:
        calls.append(items)
        return returned

    outcomes = call_all(function, "f", [0, 1], "bisect")
    assert [str(outcome) for outcome in outcomes] == [message, message]
    assert all(isinstance(outcome, BatchResultError) for outcome in outcomes)
    assert len(calls) == 1


def test_stop_iteration_of_the_function_is_an_error_like_others() -> None:
    def function(items: list[int]) -> list[int]:
        raise StopIteration

    assert [type(outcome) for outcome in call_all(function, "f", [0, 1], "bisect")] == [StopIteration, StopIteration]
