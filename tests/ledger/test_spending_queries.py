"""Spending that a restarted gateway reads from the ledger."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, create_engine

from inferry.admission.quota_gate import QuotaGate
from inferry.domain.callers import Caller
from inferry.domain.errors import RunBudgetExhausted, TenantBudgetExhausted
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.spending import Spending
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.values import replace
from inferry.ledger.spending_queries import query_spending
from inferry.ledger.stores.attempts import AttemptStore
from ledger.builders import an_entry
from support.builders import a_job

NOON = datetime(2026, 3, 15, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[AttemptStore]:
    with closing(AttemptStore(ledger_url)) as ledger:
        yield ledger


@pytest.fixture
def engine(ledger_url: str, ledger: AttemptStore) -> Iterator[Engine]:
    engine = create_engine(ledger_url.replace("postgresql:", "postgresql+psycopg:"))
    yield engine
    engine.dispose()


def an_answer(number: int, tokens: int = 10, **fields: object) -> LedgerEntry:
    entry = an_entry(number, outcome=Outcome.DONE, ended_at=NOON, prompt_tokens=tokens - 1, output_tokens=1)
    return replace(entry, **{"tenant": "a", "run_id": "r", "cost_nanos": tokens, **fields})


def found(rows: list[Spending], period: str) -> dict[tuple[str, str | None, str | None], tuple[int, int]]:
    return {(one.tenant, one.key_id, one.run_id): (one.tokens, one.nanos) for one in rows if one.period == period}


def test_days_and_months_are_added_up_by_tenant_and_by_key(ledger: AttemptStore, engine: Engine) -> None:
    ledger.append(
        [
            an_answer(1, 10, key_id="k1"),
            an_answer(2, 20, key_id="k2"),
            an_answer(3, 40),
            an_answer(4, 80, key_id="k1", ended_at=NOON - 13 * HOUR),  # yesterday
            an_answer(5, 160, ended_at=NOON - 15 * 24 * HOUR),  # February
            an_answer(6, 320, tenant="b"),
        ]
    )
    rows = query_spending(engine, NOON)
    assert found(rows, "day") == {
        ("a", "k1", None): (10, 10),
        ("a", "k2", None): (20, 20),
        ("a", None, None): (70, 70),
        ("b", None, None): (320, 320),
    }
    assert found(rows, "month")["a", "k1", None] == (90, 90)
    assert found(rows, "month")["a", None, None] == (150, 150)
    assert {one.tenant for one in query_spending(engine, NOON, tenant="b")} == {"b"}


def test_only_charged_attempts_are_summed(ledger: AttemptStore, engine: Engine) -> None:
    ledger.append(
        [
            an_answer(1, 10, outcome=Outcome.FAILED),
            an_answer(2, 20, outcome=Outcome.PREEMPTED),
            an_answer(3, 40, outcome=Outcome.EXPIRED),
            an_answer(4, 80, outcome=Outcome.CANCELLED, first_token_ms=5.0),
            an_answer(5, 160, shared_with="job-4"),
            an_answer(6, 320, cost_nanos=None),
            an_answer(7, 640, outcome=Outcome.EXPIRED, error_code="deadline_exceeded"),
            an_answer(8, 1280, outcome=Outcome.CANCELLED, first_token_ms=None),
        ]
    )
    assert found(query_spending(engine, NOON), "day") == {("a", None, None): (400, 80)}


def test_a_call_whose_deadline_passed_after_its_first_token_is_added_up(ledger: AttemptStore, engine: Engine) -> None:
    ledger.append([an_answer(1, 10, outcome=Outcome.EXPIRED, error_code="deadline_exceeded", first_token_ms=5.0)])
    assert found(query_spending(engine, NOON), "day") == {("a", None, None): (10, 10)}


def test_a_resumed_call_that_was_cancelled_before_its_next_token_is_added_up(
    ledger: AttemptStore, engine: Engine
) -> None:
    ledger.append([an_answer(1, 10, outcome=Outcome.CANCELLED, attempt=2, first_token_ms=None)])
    assert found(query_spending(engine, NOON), "day") == {("a", None, None): (10, 10)}


def test_a_run_has_spent_what_all_below_it_have(ledger: AttemptStore, engine: Engine) -> None:
    ledger.append(
        [
            an_answer(1, 10, run_id="root"),
            an_answer(2, 20, run_id="middle", parent_run="root"),
            an_answer(3, 40, run_id="leaf", parent_run="middle"),
            an_answer(4, 80, run_id="leaf", parent_run=None),
            an_answer(5, 160, job_id="job-5", run_id="job-5", parent_run="root"),
            an_answer(6, 320, job_id="job-6", run_id="job-6"),
            an_answer(7, 640, run_id="root", tenant="b"),
        ]
    )
    rows = query_spending(engine, NOON)
    assert found(rows, "run") == {
        ("a", None, "root"): (310, 310),
        ("a", None, "middle"): (140, 140),
        ("a", None, "leaf"): (120, 120),
        ("b", None, "root"): (640, 640),
    }
    assert {one.run_id: one.parent_run for one in rows if one.tenant == "a" and one.run_id} == {
        "root": None,
        "middle": "root",
        "leaf": "middle",
    }


def test_runs_that_are_over_are_left_out_and_circles_end(ledger: AttemptStore, engine: Engine) -> None:
    ledger.append(
        [
            an_answer(1, 10, run_id="old", ended_at=NOON - 25 * HOUR),
            an_answer(2, 20, run_id="quiet", ended_at=NOON - 25 * HOUR),
            an_answer(3, 40, run_id="busy", parent_run="quiet"),
            an_answer(4, 80, run_id="x", parent_run="y"),
            an_answer(5, 160, run_id="y", parent_run="x"),
        ]
    )
    runs = found(query_spending(engine, NOON), "run")
    assert runs == {
        ("a", None, "quiet"): (60, 60),
        ("a", None, "busy"): (40, 40),
        ("a", None, "x"): (240, 240),
        ("a", None, "y"): (240, 240),
    }


def test_a_restarted_gateway_counts_earlier_spending(ledger: AttemptStore, engine: Engine) -> None:
    ledger.append([an_answer(1, 60, run_id="root"), an_answer(2, 30, run_id="sub", parent_run="root")])
    gate = QuotaGate({})
    gate.restore(query_spending(engine, NOON))
    gate.restore(query_spending(engine, NOON))  # nothing is counted twice
    job = a_job(tokens=5, output=20, run_id="sub")
    by_run = Caller(Tenant(name="a", limits=Limits(run_token_ceiling=100)))
    permit = gate.admit(job, by_run, ("sub", "root"), 0.0, NOON)
    assert permit.output_cap == 5
    gate.settle(permit, None, 0.0, NOON)
    with pytest.raises(RunBudgetExhausted):
        gate.admit(job, Caller(Tenant(name="a", limits=Limits(run_token_ceiling=95))), ("sub", "root"), 0.0, NOON)
    by_day = Caller(Tenant(name="a", limits=Limits(day_token_ceiling=100, month_token_ceiling=96)))
    permit = gate.admit(job, by_day, ("other",), 0.0, NOON)
    assert permit.output_cap == 1
    gate.settle(permit, None, 0.0, NOON)
    tomorrow = NOON + 24 * HOUR
    with pytest.raises(TenantBudgetExhausted):
        gate.admit(job, Caller(Tenant(name="a", limits=Limits(month_token_ceiling=90))), ("r",), 0.0, tomorrow)
    gate.admit(job, Caller(Tenant(name="a", limits=Limits(day_token_ceiling=90))), ("r",), 0.0, tomorrow)
