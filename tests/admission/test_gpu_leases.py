"""Budgets in money of a model with a price per GPU-hour."""

import pytest

from admission.builders import NOON, a_call, a_caller
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.domain.callers import Caller
from inferry.domain.errors import TenantBudgetExhausted
from inferry.domain.jobs import InferenceJob
from inferry.domain.prices import Price
from inferry.domain.streams import Usage

PRICES = {"m": Price(input=1.0, output=10.0), "gpu": Price(gpu_hour=3.6)}
"""A GPU-second costs a million billionths."""


def admit(gate: QuotaGate, caller: Caller, job: InferenceJob) -> Permit:
    return gate.admit(job, caller, (job.run_id,), 0.0, NOON)


def test_gpu_time_is_charged_at_the_end_until_the_budget_is_exhausted() -> None:
    gate, caller = QuotaGate(PRICES), a_caller(day_money_ceiling=0.002)
    permit = admit(gate, caller, a_call(model="gpu"))
    assert gate.settle(permit, Usage(10, 0, 20, gpu_seconds=1.5), 0.0, NOON) == 1_500_000
    permit = admit(gate, caller, a_call(model="gpu"))
    gate.settle(permit, Usage(10, 0, 20, gpu_seconds=1.5), 0.0, NOON)
    assert gate.overrun_nanos == 1_000_000
    with pytest.raises(TenantBudgetExhausted):
        admit(gate, caller, a_call(model="gpu"))
    admit(gate, caller, a_call(model="other"))


def test_the_lease_of_gpu_time_follows_what_a_running_job_has_used() -> None:
    gate, caller = QuotaGate(PRICES), a_caller(day_money_ceiling=0.002)
    first, second = admit(gate, caller, a_call(model="gpu")), admit(gate, caller, a_call(model="gpu"))
    assert gate.lease_gpu_time(first, 0.5)
    assert gate.lease_gpu_time(second, 1.4)
    assert gate.lease_gpu_time(first, 0.4), "a lease does not shrink"
    (account,) = gate.report("a")
    assert (account.spent_nanos, account.leased_nanos) == (0, 1_900_000)
    assert not gate.lease_gpu_time(first, 0.7)
    (account,) = gate.report("a")
    assert account.leased_nanos == 2_000_000, "what is left is leased, and no more"
    assert isinstance(gate.exhausted_error(first), TenantBudgetExhausted)
    assert gate.settle(first, Usage(10, 0, 20, gpu_seconds=0.6), 0.0, NOON) == 600_000
    gate.settle(second, Usage(10, 0, 20, gpu_seconds=1.4), 0.0, NOON)
    (account,) = gate.report("a")
    assert (account.spent_nanos, account.leased_nanos, gate.overrun_nanos) == (2_000_000, 0, 0)


def test_gpu_time_of_models_with_other_prices_is_not_leased() -> None:
    gate, caller = QuotaGate(PRICES), a_caller(day_money_ceiling=0.002)
    assert (gate.charges_gpu_time, QuotaGate({"m": PRICES["m"]}).charges_gpu_time) == (True, False)
    for model in ("m", "other"):
        permit = admit(gate, caller, a_call(10, 10, model=model))
        leased = permit.leased_nanos
        assert gate.lease_gpu_time(permit, 1e6)
        assert permit.leased_nanos == leased
