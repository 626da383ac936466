"""Embed stages that start together: one call, and each stage has its own vectors or error."""

import asyncio
from array import array

import pytest

from inferry.domain.errors import GatewayError, InvalidRequest, QueueFull
from inferry.pipelines.joint_embeds import JointEmbeds, Vectors
from support.virtual_time import run_virtual


class Embedder:
    """Embeds a text as its length. Refuses a call with `invalid` among its texts, or all if it is `full`."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.calls: list[tuple[list[str], float | None]] = []
        self.is_full = is_full

    async def __call__(self, texts: list[str], deadline: float | None) -> Vectors:
        self.calls.append((list(texts), deadline))
        await asyncio.sleep(1.0)
        if self.is_full:
            raise QueueFull("full")
        if "invalid" in texts:
            raise InvalidRequest("too long")
        return [array("f", [len(text)]) for text in texts]


def together(
    embedder: Embedder, *stages: tuple[str, list[str], float | None]
) -> list[list[float] | GatewayError | BaseException]:
    """What stages (key, texts, deadline) get that start at the same time."""

    async def scenario() -> list[Vectors | BaseException]:
        joint = JointEmbeds()
        return await asyncio.gather(*(joint.embed(*stage, embedder) for stage in stages), return_exceptions=True)

    return [one if isinstance(one, BaseException) else [vector[0] for vector in one] for one in run_virtual(scenario())]


def test_stages_that_start_together_make_one_call_with_the_latest_deadline() -> None:
    embedder = Embedder()
    assert together(embedder, ("m", ["a"], 5.0), ("m", ["bb", "ccc"], 9.0)) == [[1.0], [2.0, 3.0]]
    assert embedder.calls == [(["a", "bb", "ccc"], 9.0)]


def test_a_stage_without_a_deadline_keeps_none() -> None:
    embedder = Embedder()
    together(embedder, ("m", ["a"], None), ("m", ["bb"], 9.0))
    assert embedder.calls == [(["a", "bb"], None)]


def test_other_models_and_later_stages_make_their_own_calls() -> None:
    embedder = Embedder()
    assert together(embedder, ("m", ["a"], 5.0), ("n", ["bb"], 9.0)) == [[1.0], [2.0]]
    assert len(embedder.calls) == 2

    async def later() -> None:
        joint = JointEmbeds()
        for _ in range(2):
            await joint.embed("m", ["a"], None, embedder)

    run_virtual(later())
    assert len(embedder.calls) == 4


def test_an_invalid_text_fails_its_own_stage_only() -> None:
    embedder = Embedder()
    first, second = together(embedder, ("m", ["a"], 5.0), ("m", ["invalid"], 9.0))
    assert first == [1.0]
    assert isinstance(second, InvalidRequest)
    assert embedder.calls[1:] == [(["a"], 5.0), (["invalid"], 9.0)]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_call_that_fails_otherwise_is_not_made_again(stages: int) -> None:
    embedder = Embedder(is_full=True)
    found = together(embedder, *[("m", ["a"], 5.0)] * stages)
    assert [type(one) for one in found] == [QueueFull] * stages
    assert len(embedder.calls) == 1


def test_an_invalid_text_of_a_lone_stage_is_sent_once() -> None:
    embedder = Embedder()
    (found,) = together(embedder, ("m", ["invalid"], 5.0))
    assert isinstance(found, InvalidRequest)
    assert len(embedder.calls) == 1
