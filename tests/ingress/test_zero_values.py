"""Limits, waits and retry times of zero are reported as zero."""

import pytest

from admission.builders import a_caller
from inferry.dispatch.gateway import RateLimitStatus
from inferry.domain.errors import NoWorker, QueueFull, RateLimited, TenantConcurrency
from inferry.domain.tenants import Limits
from inferry.ingress.errors import error_headers
from inferry.ingress.openai.rate_limit_headers import format_duration, format_rate_limits, has_rate_limits


def test_a_retry_after_of_zero_is_not_taken_for_unset() -> None:
    immediately = error_headers(QueueFull("full", retry_after_s=0.0))
    assert b"retry-after: 1\r\nretry-after-ms: 0\r\n" in immediately
    assert b"retry-after: 1\r\nretry-after-ms: 1000\r\n" in error_headers(NoWorker("none"))


@pytest.mark.parametrize(
    ("seconds", "whole", "ms"), [(0.25, 1, 250), (1.0, 1, 1000), (1.0001, 2, 1001), (2.5, 3, 2500)]
)
def test_whole_seconds_are_rounded_up_and_never_zero(seconds: float, whole: int, ms: int) -> None:
    lines = error_headers(QueueFull("full", retry_after_s=seconds))
    assert b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (whole, ms) in lines


def test_a_zero_limit_is_not_retryable_and_a_full_one_is() -> None:
    assert b"retry-after" not in error_headers(RateLimited("a limit of 0"))
    assert b"x-should-retry: false" in error_headers(RateLimited("a limit of 0"))
    assert b"x-should-retry: true" in error_headers(TenantConcurrency("busy"))


def test_a_predicted_wait_of_zero_is_reported() -> None:
    error = QueueFull("full", retry_after_s=1.0)
    assert b"predicted-wait" not in error_headers(error)
    error.predicted_wait_s = 0.0
    assert b"x-inferry-predicted-wait-ms: 0\r\n" in error_headers(error)


@pytest.mark.parametrize("limits", [{"requests_per_minute": 0}, {"tokens_per_minute": 0}, {"tokens_per_minute": 5}])
@pytest.mark.parametrize("is_keys", [False, True])
def test_rate_limit_headers_cover_tenant_and_key(limits: dict[str, int], is_keys: bool) -> None:
    caller = a_caller(key=Limits(**limits)) if is_keys else a_caller(**limits)  # type: ignore[arg-type]
    assert has_rate_limits(caller) is caller


def test_rate_limit_headers_cover_no_other_limit() -> None:
    assert has_rate_limits(a_caller(max_concurrent=0, key=Limits(day_token_ceiling=0))) is None


def test_an_exhausted_rate_limit_is_reported_as_zero() -> None:
    lines = format_rate_limits(RateLimitStatus(0, 0, 0.0, 100, 0, 60.0))
    assert b"x-ratelimit-limit-requests: 0\r\nx-ratelimit-remaining-requests: 0\r\n" in lines
    assert b"x-ratelimit-reset-requests: 0ms\r\n" in lines
    assert b"x-ratelimit-remaining-tokens: 0\r\nx-ratelimit-reset-tokens: 1m0s\r\n" in lines


@pytest.mark.parametrize(("seconds", "text"), [(0.999, "999ms"), (0.9991, "1s"), (1.0, "1s"), (59.999, "59.999s")])
def test_a_thousand_milliseconds_are_a_second(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
