"""What the gateway remembers of the beginnings of prompts."""

import random

import pytest

from inferry.domain.attempts import Attempt
from inferry.domain.decisions import Decision
from inferry.domain.jobs import Estimate, Footprint
from inferry.domain.streams import Done, FinishReason, Usage
from inferry.domain.values import replace
from inferry.prediction import prefix_hits
from inferry.prediction.estimator import Estimator
from inferry.prediction.prefix_hits import LONG_SLICE_BYTES, SHORT_SLICES_BYTES, SLICE_BYTES, PrefixHitModel
from support.builders import a_job

KNOWN = (Estimate.exactly(1000), Estimate(0, 900, 1000), Estimate.exactly(5))


def _body(*parts: str) -> bytes:
    return ('{"model": "m", "prompt": "' + "".join(parts) + '"}').encode()


def _text(size: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=size))


def test_a_new_prompt_has_no_match() -> None:
    assert PrefixHitModel().match("a", "m", _body(_text(5000, 1))).share == 0.0


def test_a_prompt_that_extends_an_earlier_one_matches_up_to_its_end() -> None:
    memory = PrefixHitModel()
    system, more = _text(10 * SLICE_BYTES, 1), _text(10 * SLICE_BYTES, 2)
    memory.match("a", "m", _body(system))
    share = memory.match("a", "m", _body(system, more)).share
    assert 0.49 < share <= 0.501


def test_a_prompt_that_differs_early_has_no_match() -> None:
    memory = PrefixHitModel()
    rest = _text(20 * SLICE_BYTES, 1)
    memory.match("a", "m", _body("x", rest))
    assert memory.match("a", "m", _body("y", rest)).share == 0.0


def test_tenants_and_models_know_nothing_of_each_other() -> None:
    memory = PrefixHitModel()
    body = _body(_text(8000, 1))
    memory.match("a", "m", body)
    assert memory.match("b", "m", body).share == 0.0
    assert memory.match("a", "n", body).share == 0.0
    assert memory.match("a", "m", body).share > 0.8


def test_fields_before_the_prompt_are_ignored() -> None:
    memory = PrefixHitModel()
    text = _text(8000, 1)
    memory.match("a", "m", b'{"seed": 1, "prompt": "' + text.encode() + b'"}')
    assert memory.match("a", "m", b'{"seed": 123456, "stream": true, "prompt": "' + text.encode() + b'"}').share > 0.8


def test_long_prompts_have_few_slices() -> None:
    memory = PrefixHitModel()
    size = 1_000_000
    body = _body(_text(size, 1))
    memory.match("a", "m", body)
    assert len(memory._recent) <= SHORT_SLICES_BYTES // SLICE_BYTES + size // LONG_SLICE_BYTES
    assert memory.match("a", "m", body).share > 0.95


def test_the_thinned_chain_of_a_longer_prompt_begins_like_the_shorter_one() -> None:
    memory = PrefixHitModel()
    system = _text(16 * SLICE_BYTES + 100, 1)
    shorter = memory.match("a", "m", _body(system)).chain
    longer = memory.match("a", "m", _body(system, _text(5000, 2))).chain
    assert longer[: len(shorter) - 1] == shorter[:-1]
    assert len(longer) <= 8


def test_the_memory_is_bounded_and_forgets_what_is_oldest() -> None:
    memory = PrefixHitModel(limit=100)
    first = _body(_text(20 * SLICE_BYTES, 0))
    memory.match("a", "m", first)
    for seed in range(1, 50):
        memory.match("a", "m", _body(_text(20 * SLICE_BYTES, seed)))
        assert len(memory._recent) + len(memory._old) <= 250
    assert memory.match("a", "m", first).share == 0.0


@pytest.mark.parametrize("size", [3 * SLICE_BYTES + 700, 60_000, 150_001])
def test_a_conversation_is_known_up_to_where_it_grew(size: int) -> None:
    memory = PrefixHitModel()
    text = _text(size, 1)
    before, after = _body(text), _body(text + _text(900, 2))
    memory.match("a", "m", before)
    known = memory.match("a", "m", after).share * (len(after) - after.index(b'"prompt"'))
    assert abs(known - size) < 32
    assert memory.match("b", "m", after).share == 0.0


def test_stored_tails_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_hits, "MAX_TAIL_BYTES", 20_000)
    memory = PrefixHitModel()
    for seed in range(100):
        memory.match("a", "m", _body(_text(2 * SLICE_BYTES + 900, seed)))
    assert sum(map(len, memory._tails.values())) == memory._tail_bytes <= 20_000


def test_zero_cached_tokens_are_ignored_before_the_first_reported_hit() -> None:
    memory = PrefixHitModel()
    for _ in range(200):
        memory.learn("m", 500, 0)
    assert memory.expected("m", 500) == 450


def test_the_hit_ratio_falls_when_reported_hits_stop() -> None:
    memory = PrefixHitModel()
    memory.learn("m", 500, 100)
    for _ in range(200):
        memory.learn("m", 500, 0)
    assert memory.expected("m", 500) == 0


def test_engine_totals_correct_the_hit_ratio() -> None:
    memory = PrefixHitModel()
    memory.learn_totals("m", 100, 0)  # too little to say anything
    assert memory.expected("m", 500) == 450
    for _ in range(200):
        memory.learn_totals("m", 10_000, 6_000)
    assert 299 <= memory.expected("m", 500) <= 300
    for _ in range(200):
        memory.learn_totals("m", 10_000, 12_000)  # more than was known of
    assert memory.expected("m", 500) == 500


def test_reports_per_job_take_precedence_over_totals() -> None:
    memory = PrefixHitModel()
    for _ in range(200):
        memory.learn("m", 500, 350)
        memory.learn_totals("m", 10_000, 0)
    assert 345 <= memory.expected("m", 500) <= 352


def test_reported_hits_correct_the_hit_ratio() -> None:
    memory = PrefixHitModel()
    for _ in range(200):
        memory.learn("m", 500, 350)
    assert 345 <= memory.expected("m", 500) <= 352
    assert memory.expected("other", 500) == 450


@pytest.mark.parametrize(("cached_on_worker", "expected"), [(900, 859), (0, 900)])
def test_the_hit_ratio_is_learned_from_jobs_that_went_where_their_prefix_is(
    cached_on_worker: int, expected: int
) -> None:
    estimator, body = Estimator(), b"x" * 4096
    job = replace(a_job(tokens=1000, cached=1000), footprint=Footprint(*KNOWN))
    for cached_tokens in (1000, 0):
        attempt = Attempt(job)
        attempt.decision = Decision(picked_by="least_loaded", cached_tokens=cached_on_worker)
        attempt.ended(Done(job.job_id, FinishReason.STOP, Usage(1000, cached_tokens, 5)), 1.0)
        estimator.ended(attempt, 1.0)
    estimator.cached("a", "m", body, KNOWN[0])
    assert estimator.cached("a", "m", body, KNOWN[0])[0].expected == expected
