"""A hosted API's limits in the corners: zeros that mean something, pauses that must outlast other news."""

import math

import pytest

from inferry.adapters.workers.hosted import FIRST_PAUSE_S, LONGEST_PAUSE_S, KeyPace, Limits, Pacer, read_limits
from inferry.adapters.workers.refusals import LONGEST_WORDS, refusal
from inferry.domain.errors import NoWorker


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    key = KeyPace()
    key.refused(Limits(retry_after_s=60.0), 0.0)
    key.refused(Limits(retry_after_s=1.0), 1.0)
    assert key.more(30.0) == 0
    assert key.opens_at(30.0) == 60.0


def test_a_pause_outlasts_an_answer_to_a_call_that_was_under_way() -> None:
    key = KeyPace()
    key.sent(10)
    key.refused(Limits(retry_after_s=10.0), 0.0)
    key.heard(Limits(requests=100, requests_reset_s=1.0), 10, 1.0)
    key.accepted()
    key.ended()
    assert key.more(5.0) == 0
    assert key.more(10.0) == math.inf, "it is over at the moment it said"


def test_pauses_grow_from_refusal_to_refusal_and_begin_anew_after_an_answer() -> None:
    key = KeyPace()
    pauses = [key.refused(Limits(), now) for now in (0.0, 1.0, 2.0)]
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    key.accepted()
    assert key.refused(Limits(), 100.0) == FIRST_PAUSE_S
    assert max(key.refused(Limits(), 100.0) for _ in range(40)) == LONGEST_PAUSE_S


def test_nothing_left_is_said_and_ends_with_its_reset() -> None:
    key = KeyPace()

    def heard(limits: Limits, now: float) -> None:
        key.sent(1)
        key.heard(limits, 1, now)

    heard(Limits(requests=0, requests_reset_s=5.0), 0.0)
    assert (key.more(0.0), key.more(4.9), key.more(5.0)) == (0, 0, math.inf)
    heard(Limits(requests=0, requests_reset_s=0.0), 6.0)
    assert key.more(6.0) == math.inf, "what is reset at once is not waited for"
    heard(Limits(requests=0), 7.0)
    assert (key.more(7.5), key.more(7.0 + FIRST_PAUSE_S)) == (0, math.inf)


def test_a_refusal_pauses_for_what_has_run_out_and_not_for_what_it_does_not_name() -> None:
    assert KeyPace().refused(Limits(requests=0, requests_reset_s=3.0, tokens_reset_s=600.0), 0.0) == 3.0
    assert KeyPace().refused(Limits(requests=0, requests_reset_s=3.0, tokens=5, tokens_reset_s=600.0), 0.0) == 3.0
    assert KeyPace().refused(Limits(requests=0, requests_reset_s=3.0, tokens=0, tokens_reset_s=6.0), 0.0) == 6.0
    assert KeyPace().refused(Limits(requests_reset_s=600.0), 0.0) == FIRST_PAUSE_S


def test_to_come_back_at_once_is_an_answer() -> None:
    key = KeyPace()
    assert key.refused(Limits(requests=0, requests_reset_s=60.0, retry_after_s=0.0), 1.0) == 0.0
    assert key.more(1.0) == math.inf
    assert read_limits({b"retry-after-ms": b"0", b"retry-after": b"9"}, 0.0).retry_after_s == 0.0
    assert read_limits({b"retry-after": b"0"}, 0.0).retry_after_s == 0.0


def test_a_date_that_has_passed_is_now() -> None:
    assert read_limits({b"retry-after": b"Thu, 01 Jan 1970 00:01:00 GMT"}, 100.0).retry_after_s == 0.0


def test_the_last_call_that_is_left_is_made() -> None:
    pacer = Pacer(1)
    pacer.keys[0].sent(1)
    pacer.keys[0].heard(Limits(requests=1, requests_reset_s=60.0), 1, 0.0)
    assert pacer.choose(0.0) == 0
    pacer.keys[0].sent(1)
    assert pacer.choose(0.0) is None
    assert pacer.retry_after_s(0.0) == 60.0


def test_tokens_of_calls_that_were_answered_are_no_longer_under_way() -> None:
    key = KeyPace()
    for _ in range(200):
        key.sent(10)
        key.heard(Limits(tokens=1000, tokens_reset_s=60.0), 10, 0.0)
    assert key.more(0.0) == pytest.approx(100, abs=1)


def test_no_part_of_a_secret_is_told_however_long_the_words_around_it_are() -> None:
    secret = "sk-0123456789abcdef"
    for before in range(LONGEST_WORDS - len(secret) - 2, LONGEST_WORDS + 2):
        body = b'{"error":{"message":"%b"}}' % (b"x" * before + secret.encode())
        said = refusal("w", 400, body, secrets=[secret]).message
        assert len(said) <= LONGEST_WORDS
        assert "sk-" not in said


@pytest.mark.parametrize("seconds", [0.0, 5.0, None])
def test_a_full_upstream_says_when_to_come_back_even_if_that_is_now(seconds: float | None) -> None:
    error = refusal("w", 429, b"", retry_after_s=seconds)
    assert isinstance(error, NoWorker)
    assert error.retry_after_s == seconds
