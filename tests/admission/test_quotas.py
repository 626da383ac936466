"""Requests and tokens per minute, and concurrent calls."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.builders import NOON, a_call, a_caller, used
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.reports import RateLimitStatus
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, RateLimited, TenantConcurrency
from inferry.domain.jobs import InferenceJob
from inferry.domain.tenants import Limits, Tenant


def admit(gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, at: float = 0.0) -> Permit:
    job = a_call() if job is None else job
    return gate.admit(job, caller, (job.run_id,), at, NOON + at)


def refusal(gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, at: float = 0.0) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        admit(gate, caller, job, at)
    return caught.value


def test_a_full_bucket_admits_one_minute_of_requests_and_then_refills() -> None:
    gate, caller = QuotaGate({}), a_caller(requests_per_minute=6)
    for _ in range(6):
        admit(gate, caller)
    error = refusal(gate, caller)
    assert isinstance(error, RateLimited)
    assert error.retry_after_s == pytest.approx(10.0)
    assert error.message == "the tenant's limit of 6 requests per minute is reached"
    assert isinstance(refusal(gate, caller, at=9.9), RateLimited)
    admit(gate, caller, at=10.0)
    assert isinstance(refusal(gate, caller, at=10.0), RateLimited)


def test_an_idle_bucket_holds_at_most_one_minute() -> None:
    gate, caller = QuotaGate({}), a_caller(requests_per_minute=6)
    admit(gate, caller)
    for _ in range(6):
        admit(gate, caller, at=3600.0)
    assert isinstance(refusal(gate, caller, at=3600.0), RateLimited)


def test_reserved_tokens_are_the_prompt_and_the_output_limit() -> None:
    gate, caller = QuotaGate({}), a_caller(tokens_per_minute=100)
    admit(gate, caller, a_call(20, 30))
    admit(gate, caller, a_call(20, 10, choices=3))
    assert isinstance(refusal(gate, caller, a_call(1, 1)), RateLimited)


def test_a_call_without_a_limit_reserves_its_predicted_output() -> None:
    gate, caller = QuotaGate({}), a_caller(tokens_per_minute=100)
    admit(gate, caller, a_call(20, 4000, named=False, predicted=70))
    assert isinstance(refusal(gate, caller, a_call(5, 10)), RateLimited)
    admit(gate, caller, a_call(5, 5))


def test_unused_reserved_tokens_are_returned() -> None:
    gate, caller = QuotaGate({}), a_caller(tokens_per_minute=100)
    permit = admit(gate, caller, a_call(20, 80))
    gate.settle(permit, used(20, 30), 0.0, NOON)
    admit(gate, caller, a_call(20, 30))
    assert isinstance(refusal(gate, caller, a_call(1, 1)), RateLimited)


def test_usage_beyond_the_reservation_is_a_debt_of_the_bucket() -> None:
    gate, caller = QuotaGate({}), a_caller(tokens_per_minute=60)
    permit = admit(gate, caller, a_call(20, 40))
    gate.settle(permit, used(50, 40), 0.0, NOON)
    assert refusal(gate, caller, a_call(5, 5)).retry_after_s == pytest.approx(40.0)
    admit(gate, caller, a_call(5, 5), at=40.0)


def test_a_job_larger_than_the_bucket_enters_alone_once_it_is_full() -> None:
    gate, caller = QuotaGate({}), a_caller(tokens_per_minute=60)
    small = admit(gate, caller, a_call(5, 5))
    error = refusal(gate, caller, a_call(100, 100))
    assert error.retry_after_s == pytest.approx(10.0)
    gate.settle(small, used(5, 5), 0.0, NOON)
    admit(gate, caller, a_call(100, 100), at=10.0)
    assert isinstance(refusal(gate, caller, a_call(1, 1), at=60.0), RateLimited)


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "max_concurrent"])
def test_a_limit_of_zero_admits_no_call_and_has_no_retry_after(limit: str) -> None:
    gate, caller = QuotaGate({}), Caller(Tenant(name="a", limits=msgspec.convert({limit: 0}, Limits)))
    assert refusal(gate, caller).retry_after_s is None


def test_both_the_tenants_and_the_keys_limits_hold() -> None:
    gate = QuotaGate({})
    tight_key = a_caller(requests_per_minute=3, key=Limits(requests_per_minute=1), key_id="k1")
    other_key = a_caller(requests_per_minute=3, key=Limits(), key_id="k2")
    admit(gate, tight_key)
    assert refusal(gate, tight_key).message == "the key's limit of 1 requests per minute is reached"
    admit(gate, other_key)
    admit(gate, other_key)
    assert refusal(gate, other_key).message == "the tenant's limit of 3 requests per minute is reached"


def test_a_refusal_leaves_no_trace_in_any_bucket() -> None:
    gate = QuotaGate({})
    key = Limits(tokens_per_minute=10, max_concurrent=5)
    caller = a_caller(requests_per_minute=5, tokens_per_minute=1000, key=key)
    admit(gate, caller, a_call(3, 3))
    before = gate.rate_limit_status(caller, 0.0)
    for _ in range(20):
        assert isinstance(refusal(gate, caller, a_call(5, 5)), RateLimited)
    assert gate.rate_limit_status(caller, 0.0) == before


def test_retry_after_is_that_of_the_limit_with_the_longest_wait() -> None:
    gate, caller = QuotaGate({}), a_caller(requests_per_minute=60, tokens_per_minute=60)
    for _ in range(30):
        admit(gate, caller, a_call(1, 1))
    error = refusal(gate, caller, a_call(15, 15))
    assert error.retry_after_s == pytest.approx(30.0)
    admit(gate, caller, a_call(15, 15), at=30.0)


def test_concurrent_calls_are_limited() -> None:
    gate, caller = QuotaGate({}), a_caller(max_concurrent=2)
    first = admit(gate, caller)
    admit(gate, caller)
    error = refusal(gate, caller)
    assert isinstance(error, TenantConcurrency)
    assert error.message == "the tenant's limit of 2 concurrent calls is reached"
    gate.settle(first, used(), 1.0, NOON)
    admit(gate, caller, at=1.0)


def test_a_concurrency_refusal_gives_retry_after_from_the_end_rate() -> None:
    gate, caller = QuotaGate({}), a_caller(max_concurrent=4)
    assert refusal_with_all_taken(gate, caller, at=0.0) == pytest.approx(1.0)  # nothing is known
    permits = [admit(gate, caller, at=100.0) for _ in range(4)]
    for number in range(40):
        at = 100.0 + 0.25 * (number + 1)
        gate.settle(permits.pop(0), used(), at, NOON)
        permits.append(admit(gate, caller, at=at))
    assert refusal(gate, caller, at=111.0).retry_after_s == pytest.approx(0.25, rel=0.05)


def refusal_with_all_taken(gate: QuotaGate, caller: Caller, at: float) -> float | None:
    permits = []
    while True:
        try:
            permits.append(admit(gate, caller, at=at))
        except TenantConcurrency as error:
            for permit in permits:
                gate.settle(permit, None, at, NOON)
            return error.retry_after_s


def test_calls_of_one_tenant_use_no_quota_of_another() -> None:
    gate = QuotaGate({})
    admit(gate, a_caller("a", requests_per_minute=1))
    admit(gate, a_caller("b", requests_per_minute=1))
    assert isinstance(refusal(gate, a_caller("a", requests_per_minute=1)), RateLimited)


def test_a_job_that_never_ran_returns_all_quotas() -> None:
    gate, caller = QuotaGate({}), a_caller(requests_per_minute=5, tokens_per_minute=100, max_concurrent=1)
    before = gate.rate_limit_status(caller, 0.0)
    for _ in range(50):
        gate.settle(admit(gate, caller), None, 0.0, NOON)
    assert gate.rate_limit_status(caller, 0.0) == before


def test_a_permit_is_settled_once() -> None:
    gate, caller = QuotaGate({}), a_caller(tokens_per_minute=100, max_concurrent=2)
    permit = admit(gate, caller, a_call(20, 30))
    gate.settle(permit, used(20, 10), 0.0, NOON)
    before = gate.rate_limit_status(caller, 0.0)
    gate.settle(permit, used(20, 10), 0.0, NOON)
    assert gate.rate_limit_status(caller, 0.0) == before


def test_changed_limits_apply_from_the_next_call() -> None:
    gate = QuotaGate({})
    for _ in range(3):
        admit(gate, a_caller(requests_per_minute=3, max_concurrent=100))
    raised = a_caller(requests_per_minute=60, max_concurrent=100)
    assert refusal(gate, raised).retry_after_s == pytest.approx(1.0)
    admit(gate, raised, at=1.0)
    lowered = a_caller(requests_per_minute=60, max_concurrent=4)
    assert isinstance(refusal(gate, lowered, at=30.0), TenantConcurrency)


def test_the_status_is_that_of_the_tighter_limit() -> None:
    gate = QuotaGate({})
    caller = a_caller(requests_per_minute=60, tokens_per_minute=6000, key=Limits(requests_per_minute=600))
    assert gate.rate_limit_status(caller, 0.0) == RateLimitStatus(60, 60, 0.0, 6000, 6000, 0.0)
    admit(gate, caller, a_call(200, 400))
    rate_limit_status = gate.rate_limit_status(caller, 0.0)
    assert rate_limit_status is not None
    assert (rate_limit_status.requests_left, rate_limit_status.tokens_left) == (59, 5400)
    assert rate_limit_status.request_reset_s == pytest.approx(1.0)
    assert rate_limit_status.token_reset_s == pytest.approx(6.0)
    assert gate.rate_limit_status(a_caller(max_concurrent=5), 0.0) is None
    assert gate.rate_limit_status(a_caller("b", tokens_per_minute=7), 0.0) == RateLimitStatus(
        None, None, None, 7, 7, 0.0
    )


visits = st.lists(
    st.tuples(st.floats(0.0, 40.0), st.integers(1, 400), st.integers(1, 400), st.integers(0, 900), st.integers(0, 3)),
    max_size=60,
)


@given(visits, st.integers(1, 600), st.integers(1, 60))
def test_admitted_tokens_never_exceed_a_full_bucket_and_its_refill(
    visits: list[tuple[float, int, int, int, int]], per_minute: int, requests: int
) -> None:
    """What is used, or reserved by those in flight, beside a debt: what was used beyond what had been reserved, and a
    job larger than the bucket."""
    gate = QuotaGate({})
    caller = a_caller(tokens_per_minute=per_minute, requests_per_minute=requests)
    now, let_in, tokens, debt = 0.0, 0, 0, 0
    open_permits: list[tuple[Permit, int]] = []
    for wait_s, prompt, output, really, ends in visits:
        now += wait_s
        for permit, used_tokens in open_permits[:ends]:
            tokens += used_tokens - permit.reserved
            debt += max(0, used_tokens - permit.reserved)
            gate.settle(permit, used(used_tokens, 0), now, NOON)
        del open_permits[:ends]
        try:
            permit = admit(gate, caller, a_call(prompt, output), at=now)
        except RateLimited:
            continue
        open_permits.append((permit, really))
        let_in += 1
        tokens += permit.reserved
        debt = max(debt, permit.reserved - per_minute)
        assert permit.reserved == prompt + output
        assert let_in <= requests + requests * now / 60 + 1e-3
        assert tokens <= per_minute + per_minute * now / 60 + debt + 1e-3
