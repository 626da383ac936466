"""Which budget is spent fastest against its period."""

from typing import Any

import pytest

from admission.builders import NOON, a_call, a_caller, used
from inferry.admission.budget_burn import MIN_ELAPSED, BudgetBurn, elapsed_day, elapsed_month, highest_burn
from inferry.admission.budgets import DAY_S, Account
from inferry.admission.quota_gate import MAX_BURN_RUNS, QuotaGate


def spend(gate: QuotaGate, tenant: str, tokens: int, *, run: str = "run", wall: float = NOON, **limits: Any) -> None:
    job = a_call(tokens, 0, run=run)
    permit = gate.admit(job, a_caller(tenant, **limits), (job.run_id,), 0.0, wall)
    gate.settle(permit, used(tokens, 0), 0.0, wall)


def test_half_a_ceiling_by_noon_is_on_time_and_all_of_it_is_twice_as_fast() -> None:
    gate = QuotaGate({})
    noon = NOON - NOON % DAY_S + DAY_S / 2
    spend(gate, "slow", 50, wall=noon, day_token_ceiling=100)
    assert gate.budget_burn(noon)["day"] == BudgetBurn(1.0, "slow", "")
    spend(gate, "fast", 80, wall=noon, day_token_ceiling=100)
    assert gate.budget_burn(noon)["day"] == BudgetBurn(80 / 100 / 0.5, "fast", "")
    assert gate.budget_burn(noon + DAY_S)["day"].ratio == 0.0, "a new day"


def test_the_first_hour_of_a_period_is_no_burn() -> None:
    assert elapsed_day(0.0) == elapsed_month(0.0) == MIN_ELAPSED
    assert elapsed_day(DAY_S * 0.75) == 0.75
    assert elapsed_month(DAY_S * 15.5) == 0.5
    assert elapsed_month(DAY_S * (31 + 14)) == 0.5, "February of 1970"
    assert elapsed_month(DAY_S * (365 - 1)) == pytest.approx(30 / 31)


def test_a_run_counts_by_the_part_of_its_ceiling_that_is_spent() -> None:
    gate = QuotaGate({})
    spend(gate, "a", 90, run="r", run_token_ceiling=100)
    assert gate.budget_burn(NOON)["run"] == BudgetBurn(0.9, "a", "r")


def test_accounts_without_a_ceiling_are_passed_over() -> None:
    assert highest_burn([Account("", "tenant")], 0.5) == BudgetBurn()


def test_only_the_newest_runs_are_looked_at() -> None:
    gate = QuotaGate({})
    for number in range(MAX_BURN_RUNS + 5):
        spend(gate, "a", 10 + (number == 0), run=f"r{number}", run_token_ceiling=100)
    assert gate.budget_burn(NOON)["run"].ratio == pytest.approx(0.1)
