"""Ledger queries at their bounds, and between tenants with equal run ids."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.spending_queries import ACTIVE_S, HISTORY_S
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from ledger.builders import an_entry

NOON = datetime(2026, 3, 15, 12, tzinfo=UTC).timestamp()
MIDNIGHT = datetime(2026, 3, 15, tzinfo=UTC).timestamp()
FIRST_OF_MARCH = datetime(2026, 3, 1, tzinfo=UTC).timestamp()


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[AttemptStore]:
    with closing(AttemptStore(ledger_url)) as ledger:
        yield ledger


@pytest.fixture
def queries(ledger_url: str, ledger: AttemptStore) -> Iterator[LedgerQueries]:
    with open_queries(ledger_url) as queries:
        yield queries


def an_answer(number: int, tokens: int, ended_at: float, **fields: Any) -> LedgerEntry:
    return an_entry(number, prompt_tokens=tokens, ended_at=ended_at, tenant="a", **fields)


def tokens(queries: LedgerQueries, period: str) -> list[int]:
    return [one.tokens for one in queries.query_spending(NOON) if one.period == period]


def test_the_first_moment_of_a_day_and_of_a_month_is_part_of_it(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append(
        [
            an_answer(1, 1, MIDNIGHT),
            an_answer(2, 10, MIDNIGHT - 0.001),
            an_answer(3, 100, FIRST_OF_MARCH),
            an_answer(4, 1000, FIRST_OF_MARCH - 0.001),
        ]
    )
    assert tokens(queries, "day") == [1]
    assert tokens(queries, "month") == [111]


def test_a_run_is_over_after_its_time_and_not_before(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append(
        [
            an_answer(1, 1, NOON - ACTIVE_S, run_id="just active"),
            an_answer(2, 10, NOON - ACTIVE_S - 0.001, run_id="just over"),
            an_answer(3, 100, NOON, run_id="long"),
            an_answer(4, 1000, NOON - HISTORY_S, run_id="long"),
            an_answer(5, 10_000, NOON - HISTORY_S - 0.001, run_id="long"),
        ]
    )
    found = {one.run_id: one.tokens for one in queries.query_spending(NOON) if one.period == "run"}
    assert found == {"just active": 1, "long": 1100}


def test_a_second_attempt_is_charged_for_the_whole_and_the_first_for_nothing(
    ledger: AttemptStore, queries: LedgerQueries
) -> None:
    ledger.append(
        [
            an_answer(1, 5, NOON, attempt=1, outcome=Outcome.FAILED),
            an_answer(1, 7, NOON, attempt=2, outcome=Outcome.PREEMPTED),
            an_answer(1, 9, NOON, attempt=3, outcome=Outcome.CANCELLED),
            an_answer(2, 100, NOON, outcome=Outcome.EXPIRED),
        ]
    )
    assert tokens(queries, "day") == [9]


def test_of_one_moment_the_last_attempt_comes_first(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append([an_entry("j", attempt=attempt, ended_at=5.0) for attempt in (1, 3, 2)])
    assert [entry.attempt for entry in queries.jobs()] == [3, 2, 1]


def test_the_since_filter_includes_its_boundary(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append(
        [
            an_entry(1, ended_at=10.0, run_id="at", error_code="run_cancelled", outcome=Outcome.CANCELLED),
            an_entry(2, ended_at=9.9, run_id="before", error_code="run_cancelled", outcome=Outcome.CANCELLED),
        ]
    )
    assert [entry.run_id for entry in queries.jobs(since=10.0)] == ["at"]
    assert queries.cancelled_runs(10.0) == [("acme", "at")]
    assert [run.run_id for run in queries.runs(before=10.0)] == ["before"]
    assert [run.run_id for run in queries.runs(before=10.1)] == ["at", "before"]


def test_nothing_of_another_tenants_run_of_the_same_name_is_seen(ledger: AttemptStore, queries: LedgerQueries) -> None:
    ledger.append(
        [
            an_entry(1, tenant="a", run_id="root"),
            an_entry(2, tenant="a", run_id="mine", parent_run="root"),
            an_entry(3, tenant="b", run_id="theirs", parent_run="root"),
            # The same name below another root: to take it for a part of the tree would count it.
            an_entry(4, tenant="a", run_id="theirs"),
        ]
    )
    assert queries.sub_runs("a", "root") == ["mine"]
    assert queries.tree("a", "root").runs == 2
    assert queries.tree("b", "root").runs == 1
    assert queries.has_run("a", "root")
    assert not queries.has_run("b", "root")
