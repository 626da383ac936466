"""Limits of keys and tenants: both apply, the tighter one binds, and each has its own account."""

from typing import Any

import pytest

from admission.builders import DAY, NOON, a_call, a_caller, used
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.quota_retry_spread import QuotaRetrySpreader
from inferry.domain.callers import Caller
from inferry.domain.errors import (
    GatewayError,
    RateLimited,
    RunBudgetExhausted,
    TenantBudgetExhausted,
    TenantConcurrency,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.spending import Spending
from inferry.domain.tenants import ApiKey, Limits, Tenant

PRICES = {"m": Price(input=1.0, output=1.0)}
CEILINGS: list[tuple[str, float]] = [
    ("day_token_ceiling", 45),
    ("month_token_ceiling", 45),
    ("run_token_ceiling", 45),
    ("day_money_ceiling", 45e-6),
    ("month_money_ceiling", 45e-6),
    ("run_money_ceiling", 45e-6),
]


def came_in(gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, now: float = 0.0) -> Permit:
    return gate.admit(job or a_call(), caller, ["run"], now, NOON + now)


def refused(gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, now: float = 0.0) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        came_in(gate, caller, job, now)
    return caught.value


@pytest.mark.parametrize(("ceiling", "most"), CEILINGS)
@pytest.mark.parametrize("whose", ["key", "tenant", "both, the key's tighter", "both, the tenant's tighter"])
def test_the_tighter_ceiling_of_tenant_and_key_binds(ceiling: str, most: float, whose: str) -> None:
    limits: dict[str, Any] = {ceiling: most}
    loose: dict[str, Any] = {ceiling: 100 * most}
    caller = {
        "key": a_caller(key=Limits(**limits)),
        "tenant": a_caller(key=Limits(), **limits),
        "both, the key's tighter": a_caller(key=Limits(**limits), **loose),
        "both, the tenant's tighter": a_caller(key=Limits(**loose), **limits),
    }[whose]
    gate = QuotaGate(PRICES, lease_tokens=20)
    permit = came_in(gate, caller)
    gate.settle(permit, used(), 0.0, NOON)  # 30 of 45
    cut = came_in(gate, caller)
    assert cut.output_cap <= 5
    gate.settle(cut, used(10, cut.output_cap), 0.0, NOON)
    assert isinstance(refused(gate, caller), RunBudgetExhausted if ceiling.startswith("run") else TenantBudgetExhausted)


def test_spending_of_a_key_counts_for_its_tenant_and_not_for_other_keys() -> None:
    gate = QuotaGate({})
    one, other = (a_caller(key=Limits(day_token_ceiling=35), key_id=name, day_token_ceiling=100) for name in "xy")
    gate.settle(came_in(gate, one), used(), 0.0, NOON)
    assert came_in(gate, other).output_cap == 20, "it has its own thirty-five"
    lines = {line.key_id: line.spent_tokens for line in gate.report("a")}
    assert lines == {None: 30, "x": 30, "y": 0}


@pytest.mark.parametrize("whose", ["tenant", "key"])
def test_concurrent_calls_are_counted_and_released_for_tenant_and_key(whose: str) -> None:
    limits: dict[str, Any] = {"max_concurrent": 1}
    caller = a_caller(key=Limits(**limits)) if whose == "key" else a_caller(key=Limits(), **limits)
    gate = QuotaGate({})
    for _ in range(3):
        permit = came_in(gate, caller)
        assert isinstance(refused(gate, caller), TenantConcurrency)
        gate.settle(permit, used(), 0.0, NOON)


@pytest.mark.parametrize("whose", ["tenant", "key"])
@pytest.mark.parametrize("limit", ["max_concurrent", "requests_per_minute", "tokens_per_minute"])
def test_a_zero_limit_admits_no_call_and_gives_no_retry_after(whose: str, limit: str) -> None:
    limits: dict[str, Any] = {limit: 0}
    caller = a_caller(key=Limits(**limits)) if whose == "key" else a_caller(key=Limits(), **limits)
    error = refused(QuotaGate({}), caller)
    assert isinstance(error, TenantConcurrency if limit == "max_concurrent" else RateLimited)
    assert error.retry_after_s is None


@pytest.mark.parametrize("whose", ["tenant", "key"])
def test_a_ceiling_of_zero_admits_no_call(whose: str) -> None:
    limits: dict[str, Any] = {"day_token_ceiling": 0}
    caller = a_caller(key=Limits(**limits)) if whose == "key" else a_caller(key=Limits(), **limits)
    assert isinstance(refused(QuotaGate({}), caller), TenantBudgetExhausted)


def test_retry_after_is_the_longer_wait_of_tenant_and_key() -> None:
    slow, fast = Limits(requests_per_minute=1), Limits(tokens_per_minute=45)  # a minute, and twenty seconds
    for tenant, key in ((slow, fast), (fast, slow)):
        gate = QuotaGate({})
        caller = Caller(Tenant(name="a", limits=tenant), ApiKey(key_id="k", tenant="a", secret_hash=b"", limits=key))
        came_in(gate, caller)
        assert refused(gate, caller).retry_after_s == pytest.approx(60.0)


def test_a_bucket_can_be_emptied_exactly() -> None:
    gate = QuotaGate({})
    caller = a_caller(key=Limits(tokens_per_minute=60))
    came_in(gate, caller)
    came_in(gate, caller)
    assert isinstance(refused(gate, caller, a_call(0, 1)), RateLimited)
    came_in(gate, caller, a_call(0, 1), now=1.0)


def test_the_rate_limit_status_is_the_tighter_of_tenant_and_key() -> None:
    for tenant, key in ((10, 3), (3, 10)):
        gate = QuotaGate({})
        caller = a_caller(
            requests_per_minute=tenant,
            tokens_per_minute=100 * tenant,
            key=Limits(requests_per_minute=key, tokens_per_minute=100 * key),
        )
        came_in(gate, caller)
        rate_limit_status = gate.rate_limit_status(caller, 0.0)
        assert rate_limit_status is not None
        assert (rate_limit_status.request_limit, rate_limit_status.requests_left) == (3, 2)
        assert (rate_limit_status.token_limit, rate_limit_status.tokens_left) == (300, 270)


def test_restored_spending_counts_for_its_key() -> None:
    gate = QuotaGate({})
    for key_id, spent_tokens in (("x", 40), (None, 40)):
        gate.restore([Spending(tenant="a", period="day", tokens=spent_tokens, nanos=0, at=NOON, key_id=key_id)])
    limits = Limits(day_token_ceiling=45)
    assert isinstance(refused(gate, a_caller(key=limits, key_id="x")), TenantBudgetExhausted)
    assert came_in(gate, a_caller(key=limits, key_id="y")).output_cap == 20
    tomorrow = gate.admit(a_call(), a_caller(key=limits, key_id="x"), ["run"], DAY, NOON + DAY)
    assert tomorrow.output_cap == 20


def test_retry_times_are_spaced_per_key_at_the_refill_rate_of_the_tighter_limit() -> None:
    spreader = QuotaRetrySpreader()
    limits = Limits(requests_per_minute=6)
    callers = [a_caller(requests_per_minute=60, key=limits, key_id=name) for name in "xyx"]
    told = []
    for caller in callers:
        error = RateLimited("no", retry_after_s=1.0)
        spreader.assign(error, a_call(), caller, 0.0)
        told.append(error.retry_after_s)
    assert told == [1.0, 1.0, 11.0]


# -- values ----------------------------------------------------------------------------------------------------------


def a_key(**limits: Any) -> ApiKey:
    return ApiKey(key_id="k", tenant="a", secret_hash=b"", limits=Limits(**limits))


def test_a_model_must_be_allowed_by_tenant_and_key() -> None:
    for tenant, key, allowed in (
        (None, None, True),
        (("m",), None, True),
        (None, ("m*",), True),
        (("m",), ("other",), False),
        (("other",), ("m",), False),
        ((), None, False),
        (None, (), False),
    ):
        caller = Caller(Tenant(name="a", limits=Limits(models=tenant)), a_key(models=key))
        assert caller.allows_model("m") is allowed


def test_a_default_lane_of_p0_is_not_taken_for_unset() -> None:
    caller = Caller(Tenant(name="a", limits=Limits(default_lane=Lane.P2)), a_key(default_lane=Lane.P0))
    assert caller.default_lane is Lane.P0


def test_a_cached_price_of_zero_is_not_taken_for_unset() -> None:
    assert Price(input=2.0, output=4.0).nanos(10, 4, 1) == 1000 * (10 * 2 + 4)
    assert Price(input=2.0, cached_input=0.0, output=4.0).nanos(10, 4, 1) == 1000 * (6 * 2 + 4)
    assert Price(input=2.0, cached_input=1.0, output=4.0).nanos(10, 4, 1) == 1000 * (6 * 2 + 4 * 1 + 4)


def test_a_price_of_zero_costs_zero_and_a_missing_price_has_no_cost() -> None:
    for prices, cost in (({}, None), ({"m": Price()}, 0), ({"m": Price(gpu_hour=3600.0)}, NANOS_PER_UNIT // 2)):
        gate = QuotaGate(prices)
        for caller in (a_caller(), a_caller(day_token_ceiling=1000)):
            permit = came_in(gate, caller)
            usage = used()
            usage = type(usage)(usage.prompt_tokens, 0, usage.output_tokens, 0.5)
            assert gate.settle(permit, usage, 0.0, NOON) == cost
            assert gate.settle(came_in(gate, caller), None, 0.0, NOON) == (None if cost is None else 0)
