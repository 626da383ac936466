"""What each item of a batch gets: its result, or its own error."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Literal

OnError = Literal["bisect", "fail"]


class BatchResultError(TypeError):
    """The function has not returned one result for each item."""


def outcomes(
    name: str, items: list[Any], on_error: OnError
) -> Generator[list[Any], Sequence[Any], list[Any | Exception]]:
    """Yield each list to call the function with, get its results or its error, and return one outcome per item.

    With `bisect`, a list that raised is called again as two halves, until the error belongs to a single item. One bad
    item of n costs about 2 log2(n) further calls; if every item is bad, 2n - 2. With `fail`, the error belongs to every
    item of the batch.
    """
    found: list[Any | Exception] = [None] * len(items)
    ranges = [(0, len(items))]
    while ranges:
        start, end = ranges.pop()
        try:
            results = yield items[start:end]
        except Exception as error:
            if on_error == "bisect" and end - start > 1:
                middle = (start + end) // 2
                ranges += [(middle, end), (start, middle)]
            else:
                found[start:end] = [error] * (end - start)
        else:
            found[start:end] = _checked(name, results, end - start)
    return found


def call_all(
    function: Callable[[list[Any]], Sequence[Any]], name: str, items: list[Any], on_error: OnError
) -> list[Any | Exception]:
    """The outcomes of a synchronous function."""
    calls = outcomes(name, items, on_error)
    try:
        call = next(calls)
        while True:
            try:
                results = function(call)
            except Exception as error:
                call = calls.throw(error)
            else:
                call = calls.send(results)
    except StopIteration as stop:
        return list(stop.value)


async def await_all(
    function: Callable[[list[Any]], Awaitable[Sequence[Any]]], name: str, items: list[Any], on_error: OnError
) -> list[Any | Exception]:
    """The outcomes of an asynchronous function."""
    calls = outcomes(name, items, on_error)
    try:
        call = next(calls)
        while True:
            try:
                results = await function(call)
            except Exception as error:
                call = calls.throw(error)
            else:
                call = calls.send(results)
    except StopIteration as stop:
        return list(stop.value)


def _checked(name: str, results: Sequence[Any], items: int) -> Sequence[Any | Exception]:
    """The results of a call; where their number is wrong, an error for every item."""
    try:
        found = -1 if isinstance(results, str | bytes | dict | set) else len(results)
    except TypeError:
        found = -1
    if found == items:
        return results
    returned = f"{found} results" if found >= 0 else f"a {type(results).__name__} instead of a list"
    return [BatchResultError(f"{name} returned {returned} for {items} items")] * items
