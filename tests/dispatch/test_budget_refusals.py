"""Refusals by budgets have one row per run."""

from inferry.dispatch import budget_refusals
from inferry.dispatch.budget_refusals import REPEAT_AFTER_S, BudgetRefusals
from inferry.domain.errors import RateLimited, RunBudgetExhausted, TenantBudgetExhausted
from inferry.domain.ledger import Outcome
from support.builders import a_job

RUN = RunBudgetExhausted("the run has spent its budget")
TENANT = TenantBudgetExhausted("the tenant has spent its budget")


def test_the_first_refusal_of_a_run_is_a_row_without_tokens() -> None:
    entry = BudgetRefusals().entry(a_job("j", run_id="r", tenant="a", at=4.0), RUN, 5.0, 1000.0)
    assert entry is not None
    assert (entry.job_id, entry.tenant, entry.run_id, entry.ended_at) == ("j", "a", "r", 1000.0)
    assert (entry.outcome, entry.error_code, entry.prompt_tokens) == (Outcome.FAILED, "run_budget_exhausted", 0)
    assert (entry.queue_ms, entry.worker, entry.cost_nanos) == (None, None, None)


def test_repeated_refusals_of_a_run_add_no_row_for_an_hour() -> None:
    refusals = BudgetRefusals()

    def rows(run: str, now: float, tenant: str = "a") -> bool:
        return refusals.entry(a_job(run_id=run, tenant=tenant, at=now), RUN, now, 0.0) is not None

    assert [rows("r", 0.0), rows("r", 1.0), rows("other", 2.0), rows("r", 3.0, "b")] == [True, False, True, True]
    assert [rows("r", REPEAT_AFTER_S - 1), rows("r", REPEAT_AFTER_S), rows("r", REPEAT_AFTER_S + 1)] == [
        *(False, True, False),
    ]


def test_calls_without_a_run_count_together_and_other_refusals_not_at_all() -> None:
    refusals = BudgetRefusals()
    found = [refusals.entry(a_job(name, run_id=name), TENANT, 0.0, 0.0) for name in ("one", "two")]
    assert [entry is not None for entry in found] == [True, False]
    assert refusals.entry(a_job(run_id="r"), RateLimited("too many"), 0.0, 0.0) is None


def test_memory_is_bounded() -> None:
    refusals = BudgetRefusals()
    for number in range(budget_refusals.MAX_REMEMBERED + 50):
        refusals.entry(a_job("j", run_id=str(number)), RUN, 0.0, 0.0)
    assert len(refusals._recorded) == budget_refusals.MAX_REMEMBERED
