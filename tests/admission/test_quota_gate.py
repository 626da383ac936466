"""The quota gate: shadow mode, changed limits, eviction and restore."""

import pytest

from admission.builders import DAY, NOON, a_call, a_caller, used
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import RUN_IDLE_TIMEOUT_S, QuotaGate
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, RateLimited, RunBudgetExhausted, TenantBudgetExhausted
from inferry.domain.jobs import Footprint, InferenceJob
from inferry.domain.prices import Price
from inferry.domain.spending import Spending
from inferry.domain.tenants import Limits
from inferry.domain.values import replace


def admit(
    gate: QuotaGate, caller: Caller, job: InferenceJob | None = None, *lineage: str, at: float = 0.0, wall: float = NOON
) -> Permit:
    job = a_call() if job is None else job
    return gate.admit(job, caller, lineage or (job.run_id,), at, wall)


# -- shadow ----------------------------------------------------------------------------------------------------------


def test_a_shadow_tenant_is_never_limited_and_its_refusals_are_counted() -> None:
    gate = QuotaGate({"m": Price(output=1.0)})
    caller = a_caller(shadow=True, requests_per_minute=2, day_token_ceiling=100, run_money_ceiling=0.00001)
    for _ in range(5):
        permit = admit(gate, caller, a_call(10, 40))
        assert (permit.granted_tokens, permit.output_cap) == (2**63 - 1, 2**63 - 1)
        gate.settle(permit, used(10, 40), 0.0, NOON)
    assert gate.shadow_refused == {"run_money_ceiling": 1, "day_token_ceiling": 3}
    assert gate.refused == {}
    assert [(line.spent_tokens, line.leased_tokens) for line in gate.report("a")] == [(250, 0)]


def test_shadow_mode_counts_each_refusal_once() -> None:
    gate, caller = QuotaGate({}), a_caller(shadow=True, requests_per_minute=60)
    for second in range(30):
        for _ in range(5):
            gate.settle(admit(gate, caller, at=float(second)), used(), float(second), NOON)
    enforced, refused = QuotaGate({}), 0
    for second in range(30):
        for _ in range(5):
            try:
                enforced.settle(
                    admit(enforced, a_caller(requests_per_minute=60), at=float(second)), used(), float(second), NOON
                )
            except RateLimited:
                refused += 1
    assert gate.shadow_refused == {"requests_per_minute": refused}
    assert enforced.refused == {"requests_per_minute": refused}
    assert refused > 20


def test_what_was_spent_in_shadow_counts_once_the_limits_are_enforced() -> None:
    gate = QuotaGate({})
    gate.settle(admit(gate, a_caller(shadow=True, day_token_ceiling=50)), used(40, 40), 0.0, NOON)
    with pytest.raises(TenantBudgetExhausted):
        admit(gate, a_caller(day_token_ceiling=50))


# -- limits that change ----------------------------------------------------------------------------------------------


def test_a_ceiling_that_is_raised_holds_for_the_next_renewal() -> None:
    gate = QuotaGate({}, lease_tokens=16)
    permit = admit(gate, a_caller(run_token_ceiling=10_000, day_token_ceiling=60), a_call(10, 500, named=False))
    assert permit.output_cap == 50
    gate.settle(permit, None, 0.0, NOON)
    permit = admit(gate, a_caller(run_token_ceiling=10_000, day_token_ceiling=600), a_call(10, 500, named=False))
    for _ in range(40):
        gate.renew(permit, permit.granted_tokens)
    assert permit.granted_tokens == 590
    gate.settle(admit(gate, a_caller(run_token_ceiling=10_000)), None, 0.0, NOON)  # no ceiling for a day any more
    assert gate.renew(permit, permit.granted_tokens) == 606


def test_a_ceiling_lowered_below_the_committed_amount_grants_no_lease() -> None:
    gate = QuotaGate({}, lease_tokens=100)
    first = admit(gate, a_caller(run_token_ceiling=1_000), a_call(10, 500))
    with pytest.raises(RunBudgetExhausted):
        admit(gate, a_caller(run_token_ceiling=20), a_call(10, 500))
    assert gate.renew(first, 10) == first.granted_tokens == 16
    assert isinstance(gate.exhausted_error(first), RunBudgetExhausted)
    gate.settle(first, used(10, 16), 0.0, NOON)
    line = gate.run_report("a", "run")
    assert line is not None
    assert (line.spent_tokens, line.leased_tokens, line.token_ceiling) == (26, 0, 20)


# -- who shares another's answer -------------------------------------------------------------------------------------


def test_a_job_without_output_needs_no_budget_and_counts_as_a_request() -> None:
    gate = QuotaGate({"m": Price(output=1.0)})
    caller = a_caller(run_token_ceiling=30, day_money_ceiling=0.00002, requests_per_minute=2)
    gate.settle(admit(gate, caller, a_call(10, 20)), used(10, 20), 0.0, NOON)
    job = a_call()
    nothing = replace(job.footprint.prompt, low=0, expected=0, high=0)
    free = replace(job, token_budget=0, footprint=Footprint(nothing, nothing, nothing))
    permit = admit(gate, caller, free)
    assert permit.leased_tokens == 0
    gate.settle(permit, used(0, 0), 0.0, NOON)
    with pytest.raises(RateLimited):
        admit(gate, caller, free)


# -- what is forgotten -----------------------------------------------------------------------------------------------


def test_the_account_of_an_ended_run_is_dropped_with_its_last_job() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=1_000)
    permit = admit(gate, caller)
    gate.end_run("a", "run")
    assert gate.run_report("a", "run") is not None
    gate.settle(permit, used(), 0.0, NOON)
    assert gate.run_report("a", "run") is None
    gate.end_run("a", "run")
    gate.end_run("nobody", "run")


def test_the_account_of_a_run_that_continues_after_its_end_is_kept() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=1_000)
    first = admit(gate, caller)
    gate.end_run("a", "run")
    second = admit(gate, caller, at=2.0)
    gate.settle(first, used(), 2.0, NOON)
    gate.settle(second, used(), 2.0, NOON)
    line = gate.run_report("a", "run")
    assert line is not None
    assert line.spent_tokens == 60


def test_accounts_of_idle_runs_are_dropped_and_those_with_jobs_are_kept() -> None:
    gate, caller = QuotaGate({}, run_idle_s=100.0), a_caller(run_token_ceiling=1_000)
    in_flight = admit(gate, caller, a_call(run="busy"))
    gate.settle(admit(gate, caller, a_call(run="idle")), used(), 0.0, NOON)
    assert gate.forget_idle(99.0) == 0
    assert gate.forget_idle(100.0) == 1
    assert gate.run_report("a", "idle") is None
    gate.settle(in_flight, used(), 200.0, NOON)
    assert gate.forget_idle(300.0) == 1
    assert RUN_IDLE_TIMEOUT_S >= 3_600


def test_the_number_of_idle_run_accounts_is_bounded() -> None:
    gate, caller = QuotaGate({}, max_runs=100), a_caller(run_token_ceiling=1_000)
    held = [admit(gate, caller, a_call(run=f"held-{number}")) for number in range(10)]
    for number in range(1_000):
        gate.settle(admit(gate, caller, a_call(run=f"run-{number}")), used(), 0.0, NOON)
    assert gate.run_count <= 110
    assert gate.run_report("a", "run-999") is not None
    for permit in held:
        gate.settle(permit, used(), 0.0, NOON)


def test_the_number_of_owners_is_bounded_and_owners_with_jobs_are_kept() -> None:
    gate = QuotaGate({}, max_owners=100)
    busy = admit(gate, a_caller("busy", max_concurrent=1))
    for number in range(5_000):
        caller = a_caller(f"tenant-{number}", requests_per_minute=5, key=Limits(), key_id=f"key-{number}")
        gate.settle(admit(gate, caller), used(), 0.0, NOON)
    assert gate.owner_count <= 200
    with pytest.raises(GatewayError):
        admit(gate, a_caller("busy", max_concurrent=1))
    gate.settle(busy, used(), 0.0, NOON)


def test_owners_without_spending_are_evicted_first() -> None:
    gate = QuotaGate({}, max_owners=100)
    spender = a_caller("spender", day_token_ceiling=30)
    gate.settle(admit(gate, spender), used(), 0.0, NOON)
    for number in range(1_000):
        caller = a_caller(f"tenant-{number}", requests_per_minute=5)
        gate.settle(admit(gate, caller, at=float(number)), used(), float(number), NOON)
    with pytest.raises(TenantBudgetExhausted):
        admit(gate, spender, at=1_000.0)


def test_a_refused_call_creates_no_run_account() -> None:
    gate, caller = QuotaGate({}), a_caller(run_token_ceiling=5)
    with pytest.raises(RunBudgetExhausted):
        admit(gate, caller)
    assert gate.run_count == 0


# -- what is restored ------------------------------------------------------------------------------------------------


def test_restored_spending_counts_once_in_day_month_and_run() -> None:
    gate = QuotaGate({})
    before = [
        Spending(tenant="a", period="day", tokens=50, nanos=5, at=NOON),
        Spending(tenant="a", period="month", tokens=70, nanos=7, at=NOON),
        Spending(tenant="a", period="month", tokens=90, nanos=7, at=NOON, key_id="k"),
        Spending(tenant="a", period="run", tokens=30, nanos=3, at=NOON, run_id="run"),
        Spending(tenant="a", period="day", tokens=1_000, nanos=7, at=NOON - DAY),
    ]
    for _ in range(2):
        gate.restore(before)
    caller = a_caller(
        run_token_ceiling=1_000, day_token_ceiling=1_000, month_token_ceiling=1_000, key=Limits(month_token_ceiling=500)
    )
    gate.settle(admit(gate, caller), used(), 0.0, NOON)
    gate.restore(before[:1])
    assert {(line.key_id, line.kind): line.spent_tokens for line in gate.report("a")} == {
        (None, "day"): 80,
        (None, "month"): 100,
        ("k", "month"): 120,
    }
    line = gate.run_report("a", "run")
    assert line is not None
    assert line.spent_tokens == 60
