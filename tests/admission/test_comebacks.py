"""Callers that are over a limit are told to come back one after the other."""

import pytest

from inferry.admission.comebacks import LONGEST_S, Comebacks
from inferry.domain.callers import Caller
from inferry.domain.errors import QueueFull, RateLimited, TenantConcurrency
from inferry.domain.tenants import Limits, Tenant
from support.builders import a_job


def a_caller(name: str = "acme", **limits: int) -> Caller:
    return Caller(Tenant(name=name, limits=Limits(**limits)))  # type: ignore[arg-type]


def told(comebacks: Comebacks, caller: Caller, wait_s: float, now: float = 50.0) -> float:
    refusal = RateLimited("too many", retry_after_s=wait_s)
    comebacks.tell(refusal, a_job(), caller, now)
    assert refusal.retry_after_s is not None
    return refusal.retry_after_s


def test_each_is_told_a_moment_of_its_own_as_far_apart_as_the_limit_grows() -> None:
    comebacks, caller = Comebacks(), a_caller(requests_per_minute=120)
    assert [told(comebacks, caller, 0.4) for _ in range(4)] == pytest.approx([0.4, 0.9, 1.4, 1.9])


def test_nobody_is_told_to_come_before_the_limit_has_room() -> None:
    comebacks, caller = Comebacks(), a_caller(requests_per_minute=120)
    told(comebacks, caller, 0.4, now=50.0)
    assert told(comebacks, caller, 0.4, now=60.0) == pytest.approx(0.4)


def test_one_caller_does_not_delay_another() -> None:
    comebacks = Comebacks()
    for _ in range(10):
        told(comebacks, a_caller(requests_per_minute=60), 1.0)
    assert told(comebacks, a_caller("other", requests_per_minute=60), 1.0) == pytest.approx(1.0)


def test_a_call_that_takes_more_tokens_is_further_behind() -> None:
    comebacks, caller = Comebacks(), a_caller(tokens_per_minute=6_000)
    job = a_job(tokens=100)
    needs = 100 + min(job.token_budget, job.footprint.output.high)
    first, second = RateLimited("", retry_after_s=1.0), RateLimited("", retry_after_s=1.0)
    comebacks.tell(first, job, caller, 0.0)
    comebacks.tell(second, job, caller, 0.0)
    assert second.retry_after_s == pytest.approx(1.0 + needs / 100)


def test_nobody_is_told_longer_than_clients_wait_for_the_sake_of_others() -> None:
    comebacks, caller = Comebacks(), a_caller(requests_per_minute=1)
    times = [told(comebacks, caller, 30.0) for _ in range(5)]
    assert max(times) <= LONGEST_S
    assert times.count(30.0) > 1, "who finds no moment of its own is told the limit's"


def test_calls_over_the_concurrency_come_as_others_end() -> None:
    comebacks, caller = Comebacks(), a_caller(max_concurrent=2)
    first, second = TenantConcurrency("", retry_after_s=0.5), TenantConcurrency("", retry_after_s=0.5)
    comebacks.tell(first, a_job(), caller, 0.0)
    comebacks.tell(second, a_job(), caller, 0.0)
    assert (first.retry_after_s, second.retry_after_s) == (0.5, 1.0)


def test_a_full_queue_is_none_of_its_business() -> None:
    refusal = QueueFull("full", retry_after_s=3.0)
    Comebacks().tell(refusal, a_job(), a_caller(requests_per_minute=1), 0.0)
    assert refusal.retry_after_s == 3.0
    assert not refusal.is_own_turn
