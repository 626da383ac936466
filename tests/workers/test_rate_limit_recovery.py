"""Rate limits of a hosted API at their bounds: zeros, and pauses that later responses must not shorten."""

import math

import pytest

from inferry.domain.errors import NoWorker
from inferry.workers.openai_http.rate_limits import (
    INITIAL_PAUSE_S,
    MAX_PAUSE_S,
    KeyRateLimiter,
    KeyRateLimiters,
    RateLimits,
    parse_rate_limits,
)
from inferry.workers.openai_http.upstream_errors import MAX_MESSAGE_CHARS, upstream_error


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    key = KeyRateLimiter()
    key.refused(RateLimits(retry_after_s=60.0), 0.0)
    key.refused(RateLimits(retry_after_s=1.0), 1.0)
    assert key.available(30.0) == 0
    assert key.available_at(30.0) == 60.0


def test_a_pause_outlasts_a_response_to_an_earlier_call() -> None:
    key = KeyRateLimiter()
    key.sent(10)
    key.refused(RateLimits(retry_after_s=10.0), 0.0)
    key.on_response(RateLimits(requests=100, requests_reset_s=1.0), 10, 1.0)
    key.accepted()
    key.ended()
    assert key.available(5.0) == 0
    assert key.available(10.0) == math.inf, "it is over at the moment it said"


def test_pauses_grow_from_refusal_to_refusal_and_begin_anew_after_an_answer() -> None:
    key = KeyRateLimiter()
    pauses = [key.refused(RateLimits(), now) for now in (0.0, 1.0, 2.0)]
    assert pauses == [INITIAL_PAUSE_S, 2 * INITIAL_PAUSE_S, 4 * INITIAL_PAUSE_S]
    key.accepted()
    assert key.refused(RateLimits(), 100.0) == INITIAL_PAUSE_S
    assert max(key.refused(RateLimits(), 100.0) for _ in range(40)) == MAX_PAUSE_S


def test_a_limit_of_zero_holds_until_its_reset() -> None:
    key = KeyRateLimiter()

    def on_response(limits: RateLimits, now: float) -> None:
        key.sent(1)
        key.on_response(limits, 1, now)

    on_response(RateLimits(requests=0, requests_reset_s=5.0), 0.0)
    assert (key.available(0.0), key.available(4.9), key.available(5.0)) == (0, 0, math.inf)
    on_response(RateLimits(requests=0, requests_reset_s=0.0), 6.0)
    assert key.available(6.0) == math.inf, "what is reset at once is not waited for"
    on_response(RateLimits(requests=0), 7.0)
    assert (key.available(7.5), key.available(7.0 + INITIAL_PAUSE_S)) == (0, math.inf)


def test_a_refusal_pauses_for_what_has_run_out_and_not_for_what_it_does_not_name() -> None:
    assert KeyRateLimiter().refused(RateLimits(requests=0, requests_reset_s=3.0, tokens_reset_s=600.0), 0.0) == 3.0
    assert (
        KeyRateLimiter().refused(RateLimits(requests=0, requests_reset_s=3.0, tokens=5, tokens_reset_s=600.0), 0.0)
        == 3.0
    )
    assert (
        KeyRateLimiter().refused(RateLimits(requests=0, requests_reset_s=3.0, tokens=0, tokens_reset_s=6.0), 0.0) == 6.0
    )
    assert KeyRateLimiter().refused(RateLimits(requests_reset_s=600.0), 0.0) == INITIAL_PAUSE_S


def test_a_retry_after_of_zero_is_used() -> None:
    key = KeyRateLimiter()
    assert key.refused(RateLimits(requests=0, requests_reset_s=60.0, retry_after_s=0.0), 1.0) == 0.0
    assert key.available(1.0) == math.inf
    assert parse_rate_limits({b"retry-after-ms": b"0", b"retry-after": b"9"}, 0.0).retry_after_s == 0.0
    assert parse_rate_limits({b"retry-after": b"0"}, 0.0).retry_after_s == 0.0


def test_a_date_that_has_passed_is_now() -> None:
    assert parse_rate_limits({b"retry-after": b"Thu, 01 Jan 1970 00:01:00 GMT"}, 100.0).retry_after_s == 0.0


def test_the_last_call_that_is_left_is_made() -> None:
    rate_limiter = KeyRateLimiters(1)
    rate_limiter.keys[0].sent(1)
    rate_limiter.keys[0].on_response(RateLimits(requests=1, requests_reset_s=60.0), 1, 0.0)
    assert rate_limiter.choose(0.0) == 0
    rate_limiter.keys[0].sent(1)
    assert rate_limiter.choose(0.0) is None
    assert rate_limiter.retry_after_s(0.0) == 60.0


def test_tokens_of_calls_that_were_answered_are_no_longer_under_way() -> None:
    key = KeyRateLimiter()
    for _ in range(200):
        key.sent(10)
        key.on_response(RateLimits(tokens=1000, tokens_reset_s=60.0), 10, 0.0)
    assert key.available(0.0) == pytest.approx(100, abs=1)


def test_no_part_of_a_secret_is_shown_however_long_the_message() -> None:
    secret = "sk-0123456789abcdef"
    for before in range(MAX_MESSAGE_CHARS - len(secret) - 2, MAX_MESSAGE_CHARS + 2):
        body = b'{"error":{"message":"%b"}}' % (b"x" * before + secret.encode())
        said = upstream_error("w", 400, body, secrets=[secret]).message
        assert len(said) <= MAX_MESSAGE_CHARS
        assert "sk-" not in said


@pytest.mark.parametrize("seconds", [0.0, 5.0, None])
def test_a_full_upstream_reports_retry_after_even_if_zero(seconds: float | None) -> None:
    error = upstream_error("w", 429, b"", retry_after_s=seconds)
    assert isinstance(error, NoWorker)
    assert error.retry_after_s == seconds
