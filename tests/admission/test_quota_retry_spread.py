"""Callers over a limit get retry times one after the other."""

import pytest

from inferry.admission.quota_retry_spread import MAX_RETRY_AFTER_S, QuotaRetrySpreader
from inferry.domain.callers import Caller
from inferry.domain.errors import QueueFull, RateLimited, TenantConcurrency
from inferry.domain.tenants import Limits, Tenant
from support.builders import a_job


def a_caller(name: str = "acme", **limits: int) -> Caller:
    return Caller(Tenant(name=name, limits=Limits(**limits)))  # type: ignore[arg-type]


def assigned(spreader: QuotaRetrySpreader, caller: Caller, wait_s: float, now: float = 50.0) -> float:
    refusal = RateLimited("too many", retry_after_s=wait_s)
    spreader.assign(refusal, a_job(), caller, now)
    assert refusal.retry_after_s is not None
    return refusal.retry_after_s


def test_retry_times_are_spaced_at_the_refill_rate() -> None:
    spreader, caller = QuotaRetrySpreader(), a_caller(requests_per_minute=120)
    assert [assigned(spreader, caller, 0.4) for _ in range(4)] == pytest.approx([0.4, 0.9, 1.4, 1.9])


def test_no_retry_time_is_before_the_limit_has_refilled() -> None:
    spreader, caller = QuotaRetrySpreader(), a_caller(requests_per_minute=120)
    assigned(spreader, caller, 0.4, now=50.0)
    assert assigned(spreader, caller, 0.4, now=60.0) == pytest.approx(0.4)


def test_one_caller_does_not_delay_another() -> None:
    spreader = QuotaRetrySpreader()
    for _ in range(10):
        assigned(spreader, a_caller(requests_per_minute=60), 1.0)
    assert assigned(spreader, a_caller("other", requests_per_minute=60), 1.0) == pytest.approx(1.0)


def test_a_call_with_more_tokens_gets_a_later_retry_time() -> None:
    spreader, caller = QuotaRetrySpreader(), a_caller(tokens_per_minute=6_000)
    job = a_job(tokens=100)
    needs = 100 + min(job.token_budget, job.footprint.output.high)
    first, second = RateLimited("", retry_after_s=1.0), RateLimited("", retry_after_s=1.0)
    spreader.assign(first, job, caller, 0.0)
    spreader.assign(second, job, caller, 0.0)
    assert second.retry_after_s == pytest.approx(1.0 + needs / 100)


def test_spacing_never_pushes_retry_after_beyond_what_clients_accept() -> None:
    spreader, caller = QuotaRetrySpreader(), a_caller(requests_per_minute=1)
    times = [assigned(spreader, caller, 30.0) for _ in range(5)]
    assert max(times) <= MAX_RETRY_AFTER_S
    assert times.count(30.0) > 1, "who finds no moment of its own is told the limit's"


def test_retry_times_of_concurrency_refusals_follow_the_end_rate() -> None:
    spreader, caller = QuotaRetrySpreader(), a_caller(max_concurrent=2)
    first, second = TenantConcurrency("", retry_after_s=0.5), TenantConcurrency("", retry_after_s=0.5)
    spreader.assign(first, a_job(), caller, 0.0)
    spreader.assign(second, a_job(), caller, 0.0)
    assert (first.retry_after_s, second.retry_after_s) == (0.5, 1.0)


def test_queue_full_errors_keep_their_retry_time() -> None:
    refusal = QueueFull("full", retry_after_s=3.0)
    QuotaRetrySpreader().assign(refusal, a_job(), a_caller(requests_per_minute=1), 0.0)
    assert refusal.retry_after_s == 3.0
    assert not refusal.has_own_retry_time
