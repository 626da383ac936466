"""Quotas of KV tokens and concurrent runs: a call counts for its peak from its admission to its end."""

from typing import Any

import pytest

from admission.builders import NOON, a_call, a_caller, used
from inferry.admission.kv_quota import RUN_PAUSE_S
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.quota_retry_spread import QuotaRetrySpreader
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, KvQuotaExceeded, KvQuotaTooSmall, TenantConcurrency
from inferry.domain.jobs import InferenceJob
from inferry.domain.tenants import Limits
from inferry.domain.values import replace


def admit(gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, *runs: str, at: float = 0.0) -> Permit:
    return gate.admit(job or a_call(), caller, runs or ("run",), at, NOON + at)


def refusal(
    gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, *runs: str, at: float = 0.0
) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        admit(gate, caller, job, *runs, at=at)
    return caught.value


def test_a_refusal_says_by_how_much_the_call_exceeds_the_limit() -> None:
    gate, caller = QuotaGate({}), a_caller(max_kv_tokens=10_000)
    admit(gate, caller, a_call(5_000, 1_200))
    error = refusal(gate, caller, a_call(12_000, 400))
    assert isinstance(error, KvQuotaTooSmall)
    assert (error.status, error.code) == (400, "kv_quota_too_small")
    assert error.message == "the call would hold 12,400 KV tokens; the tenant's limit is 10,000, 6,200 in use"
    assert error.retry_after_s is None, "no wait makes it fit"
    assert gate.refused == {"max_kv_tokens": 1}


def test_kv_tokens_are_held_exactly_up_to_the_limit_and_given_back_at_the_end() -> None:
    gate, caller = QuotaGate({}), a_caller(max_kv_tokens=100)
    first = admit(gate, caller, a_call(40, 20))
    admit(gate, caller, a_call(20, 20))
    error = refusal(gate, caller, a_call(1, 0))
    assert isinstance(error, KvQuotaExceeded)
    assert (error.status, error.code, error.retryable) == (429, "kv_quota_exceeded", True)
    assert error.retry_after_s is not None
    gate.settle(first, used(40, 5), 1.0, NOON)
    gate.settle(first, used(40, 5), 1.0, NOON)
    admit(gate, caller, a_call(40, 20), at=1.0)
    assert refusal(gate, caller, a_call(1, 0), at=1.0).message.endswith("100 in use")


def test_a_call_that_never_ran_gives_its_tokens_back() -> None:
    gate, caller = QuotaGate({}), a_caller(max_kv_tokens=100)
    gate.settle(admit(gate, caller, a_call(60, 40)), None, 0.0, NOON)
    admit(gate, caller, a_call(60, 40))


def test_a_call_without_an_output_limit_counts_for_its_predicted_output() -> None:
    gate, caller = QuotaGate({}), a_caller(max_kv_tokens=100)
    permit = admit(gate, caller, a_call(40, 1_000, named=False, predicted=60))
    assert permit.kv_tokens == 100


def test_a_run_and_its_sub_runs_share_the_limit_of_a_run() -> None:
    gate, caller = QuotaGate({}), a_caller(run_max_kv_tokens=100)
    admit(gate, caller, a_call(50, 10), "child", "root")
    error = refusal(gate, caller, a_call(50, 10), "root")
    assert error.message == "the call would hold 60 KV tokens; the run's limit is 100, 60 in use"
    admit(gate, caller, a_call(50, 10), "other")


@pytest.mark.parametrize("whose", ["key", "tenant"])
@pytest.mark.parametrize("limit", ["max_kv_tokens", "run_max_kv_tokens", "max_concurrent_runs"])
def test_limits_of_keys_and_tenants_both_hold(limit: str, whose: str) -> None:
    limits: dict[str, Any] = {limit: 1 if limit == "max_concurrent_runs" else 100}
    caller = a_caller(key=Limits(**limits)) if whose == "key" else a_caller(key=Limits(), **limits)
    gate = QuotaGate({})
    admit(gate, caller, a_call(60, 10), "a")
    error = refusal(gate, caller, a_call(60, 10), "b" if limit == "max_concurrent_runs" else "a")
    assert whose in error.message or limit == "run_max_kv_tokens"
    assert gate.refused == {limit: 1}


def test_other_tenants_are_not_affected() -> None:
    gate = QuotaGate({})
    admit(gate, a_caller("a", max_kv_tokens=100), a_call(90, 10))
    admit(gate, a_caller("b", max_kv_tokens=100), a_call(90, 10))


def test_a_tenant_in_shadow_is_told_nothing_and_holds_nothing_for_a_refused_call() -> None:
    gate, caller = QuotaGate({}), a_caller(max_kv_tokens=100, shadow=True)
    admit(gate, caller, a_call(90, 10))
    permit = admit(gate, caller, a_call(90, 10))
    assert gate.shadow_refused == {"max_kv_tokens": 1}
    gate.settle(permit, used(), 0.0, NOON)
    admit(gate, caller, a_call(1, 0))
    assert gate.shadow_refused == {"max_kv_tokens": 2}


# -- concurrent runs -------------------------------------------------------------------------------------------------


def test_a_further_run_is_refused_and_calls_of_known_runs_are_not() -> None:
    gate, caller = QuotaGate({}), a_caller(max_concurrent_runs=2)
    admit(gate, caller, None, "a")
    admit(gate, caller, None, "b")
    error = refusal(gate, caller, None, "c")
    assert isinstance(error, TenantConcurrency)
    assert error.message == "the tenant's limit of 2 concurrent runs is reached"
    admit(gate, caller, None, "a")
    admit(gate, caller, None, "sub", "b")


def test_a_run_keeps_its_place_while_it_waits_for_a_tool() -> None:
    gate, caller = QuotaGate({}), a_caller(max_concurrent_runs=1)
    gate.settle(admit(gate, caller, None, "a"), used(), 10.0, NOON)
    assert refusal(gate, caller, None, "b", at=30.0).retry_after_s == RUN_PAUSE_S - 20.0
    gate.settle(admit(gate, caller, None, "a", at=40.0), used(), 50.0, NOON)
    assert refusal(gate, caller, None, "b", at=49.0 + RUN_PAUSE_S).retry_after_s == 1.0
    admit(gate, caller, None, "b", at=50.0 + RUN_PAUSE_S)
    assert isinstance(refusal(gate, caller, None, "a", at=50.0 + RUN_PAUSE_S), TenantConcurrency)


def test_a_run_that_is_over_gives_up_its_place_once_no_call_is_in_flight() -> None:
    gate, caller = QuotaGate({}), a_caller(max_concurrent_runs=1, key=Limits(max_concurrent_runs=1))
    permit = admit(gate, caller, None, "a")
    gate.free_run_slot("tenant of nobody", "a")
    gate.free_run_slot(caller.tenant.name, "a")
    refusal(gate, caller, None, "b")
    gate.settle(permit, used(), 0.0, NOON)
    refusal(gate, caller, None, "b")
    gate.free_run_slot(caller.tenant.name, "a")
    admit(gate, caller, None, "b")


def test_a_call_without_a_run_is_a_run_until_its_end() -> None:
    gate, caller = QuotaGate({}), a_caller(max_concurrent_runs=1)
    alone = replace(a_call(), job_id="j", run_id="j")
    permit = admit(gate, caller, alone, "j")
    refusal(gate, caller, None, "b")
    gate.settle(permit, used(), 0.0, NOON)
    admit(gate, caller, None, "b")


def test_runs_are_counted_no_longer_when_the_limit_is_removed() -> None:
    gate = QuotaGate({})
    gate.settle(admit(gate, a_caller(max_concurrent_runs=1), None, "a"), used(), 0.0, NOON)
    admit(gate, a_caller(max_kv_tokens=1_000), None, "b")
    assert isinstance(refusal(gate, a_caller(max_concurrent_runs=1), None, "c"), TenantConcurrency)


@pytest.mark.parametrize("limit", ["max_kv_tokens", "run_max_kv_tokens", "max_concurrent_runs"])
def test_a_limit_of_zero_admits_no_call_and_has_no_retry_after(limit: str) -> None:
    limits: dict[str, Any] = {limit: 0}
    assert refusal(QuotaGate({}), a_caller(**limits)).retry_after_s is None


def test_refused_callers_are_told_successive_times() -> None:
    gate, caller, spreader = QuotaGate({}), a_caller(max_kv_tokens=100), QuotaRetrySpreader()
    admit(gate, caller, a_call(90, 10))
    told = []
    for _ in range(3):
        error = refusal(gate, caller, a_call(90, 10))
        spreader.assign(error, a_call(90, 10), caller, 0.0)
        told.append(error.retry_after_s)
    assert told == sorted(set(told), key=lambda one: one or 0.0)
