"""Static types survive the decorator. The assertions are mypy's: `mypy` checks this file with the whole project.

An unused `type: ignore` is an error of mypy, so each one below shows that a wrong call is found.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import assert_type

import inferry


@inferry.batched
async def lengths(texts: list[str]) -> list[int]:
    """The length of each text."""
    return [len(text) for text in texts]


@inferry.batched(max_batch=8, lane="P2")
async def vectors(texts: Sequence[str]) -> Sequence[list[float]]:
    return [[float(len(text))] for text in texts]


@inferry.batched
def doubled(numbers: list[int]) -> list[float]:
    return [2.0 * number for number in numbers]


@inferry.batched(on_error="fail")
def roots(numbers: list[float]) -> list[float | ValueError]:
    return [number**0.5 if number >= 0 else ValueError(str(number)) for number in numbers]


class Model:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @inferry.batched
    def scaled(self, numbers: list[int]) -> list[int]:
        return [self.factor * number for number in numbers]

    @inferry.batched(max_batch=4)
    async def shifted(self, numbers: list[int]) -> list[str]:
        return [str(self.factor + number) for number in numbers]


async def asynchronous_calls() -> None:
    assert_type(await lengths("a"), int)
    assert_type(await lengths("a", lane="P0"), int)
    assert_type(await lengths.acall("a"), int)
    assert_type(await doubled.acall(1), float)
    assert_type(await vectors("a"), list[float])
    assert_type(await Model(2).shifted(3), str)
    assert await Model(2).shifted(3) == "5"


async def wrong_calls() -> None:
    await lengths(3)  # type: ignore[arg-type]
    await lengths(["a"])  # type: ignore[arg-type]
    await lengths("a", lane="P7")  # type: ignore[arg-type]
    await lengths("a", lanes="P0")  # type: ignore[call-arg]
    doubled("a")  # type: ignore[arg-type]


def test_types_of_asynchronous_calls() -> None:
    asyncio.run(asynchronous_calls())


def test_types_of_synchronous_calls() -> None:
    assert_type(doubled(1), float)
    assert_type(lengths.call("a"), int)
    assert_type(doubled.submit(1), Future[float])
    assert_type(doubled.function([1]), Sequence[float | Exception])
    assert_type(Model(3).scaled(4), int)
    assert Model(3).scaled(4) == 12


def test_an_exception_among_the_results_is_no_part_of_the_type() -> None:
    assert_type(roots(4.0), float)


def wrong_functions() -> None:
    @inferry.batched  # type: ignore[arg-type]
    def not_a_list(numbers: list[int]) -> int:
        return len(numbers)

    @inferry.batched  # type: ignore[arg-type]
    def not_of_a_list(number: int) -> list[int]:
        return [number]

    inferry.batched(max_batch="8")  # type: ignore[call-overload]


def test_name_and_docstring_are_those_of_the_function() -> None:
    assert lengths.__doc__ == "The length of each text."
    assert lengths.__name__ == "lengths"  # type: ignore[attr-defined]
    assert asyncio.iscoroutinefunction(lengths.function)
