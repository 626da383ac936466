"""Prefix memory exactly at the bounds of slices; edge cases of ratios and models."""

from collections.abc import Sequence

import pytest

from inferry.dispatch.pool import Pool
from inferry.domain.clock import SystemClock
from inferry.domain.jobs import Estimate
from inferry.domain.ports import ModelCard
from inferry.domain.values import replace
from inferry.prediction import prefix_hits
from inferry.prediction.prefix_hits import LONG_SLICE_BYTES, NO_MATCH, SHORT_SLICES_BYTES, SLICE_BYTES, PrefixHitModel
from inferry.prediction.token_ratio import TokenRatios
from support.scripted_worker import ScriptedWorker


def a_prompt(size: int, letter: str = "a") -> bytes:
    """A body of which so many bytes are the prompt and what follows it."""
    start, end = b'{"model":"m",', b'"}'
    body = b'"prompt":"'
    return start + body + letter.encode() * (size - len(body) - len(end)) + end


@pytest.mark.parametrize(
    ("size", "watermarks"),
    [
        (SLICE_BYTES - 1, 0),
        (SLICE_BYTES, 1),
        (2 * SLICE_BYTES - 1, 1),
        (2 * SLICE_BYTES, 2),
        (4 * SLICE_BYTES, 3),  # after one, two and four slices
        (SHORT_SLICES_BYTES, 6),
        (SHORT_SLICES_BYTES + LONG_SLICE_BYTES - 1, 6),
        (SHORT_SLICES_BYTES + LONG_SLICE_BYTES, 7),
    ],
)
def test_a_slice_is_stored_as_soon_as_it_is_complete(size: int, watermarks: int) -> None:
    found = PrefixHitModel().match("a", "m", a_prompt(size))
    assert len(found.chain) == watermarks
    assert (found is NO_MATCH) is (watermarks == 0)


def test_a_prompt_of_exactly_one_slice_is_known_when_it_comes_again() -> None:
    memory = PrefixHitModel()
    assert memory.match("a", "m", a_prompt(SLICE_BYTES)).share == 0.0
    assert memory.match("a", "m", a_prompt(SLICE_BYTES)).share == 1.0


@pytest.mark.plain
def test_a_repeated_prompt_evicts_no_other_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_hits, "MAX_TAIL_BYTES", 2000)
    memory = PrefixHitModel()
    other, often = a_prompt(SLICE_BYTES + 500, "b"), a_prompt(SLICE_BYTES + 500, "c")
    memory.match("a", "m", other)
    for _ in range(20):
        memory.match("a", "m", often)
    assert memory.match("a", "m", other).share == 1.0, "with what stands behind its last whole slice"


def test_estimates_stay_ordered_with_several_tokens_per_byte() -> None:
    ratios = TokenRatios()
    ratios.learn("m", None, 100, 1000)
    assert ratios.estimate("m", None, 200) == Estimate(1, 2000, 2000)


def test_a_server_that_reports_no_prompt_tokens_teaches_nothing() -> None:
    ratios = TokenRatios()
    ratios.learn("m", None, 100, 0)
    ratios.learn("m", None, 100, 50)
    assert ratios.estimate("m", None, 100).expected == 50


class Carded(ScriptedWorker):
    def __init__(self, name: str, card: ModelCard) -> None:
        super().__init__(name)
        self._card = card

    def cards(self) -> Sequence[ModelCard]:
        return [self._card]


@pytest.mark.parametrize("swapped", [False, True])
def test_the_capabilities_of_a_model_are_those_that_all_its_workers_have(swapped: bool) -> None:
    able = ModelCard(name="m", context_tokens=4096, vocab_size=10, features=frozenset({"n", "tools"}), can_resume=True)
    plain = replace(able, context_tokens=1024, vocab_size=11, features=frozenset({"n"}), can_resume=False)
    cards = (plain, able) if swapped else (able, plain)
    pool = Pool([Carded(f"w{number}", card) for number, card in enumerate(cards)], SystemClock())
    card = pool.cards()["m"]
    assert card.features == {"n"}
    assert (card.context_tokens, card.vocab_size, card.can_resume) == (1024, None, False)
    unknown = replace(able, context_tokens=None)
    pool = Pool([Carded("w0", unknown), Carded("w1", plain)], SystemClock())
    assert pool.cards()["m"].context_tokens == 1024, "what one does not say binds nobody"
