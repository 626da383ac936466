"""Old rows become roll-ups: sums over both stay the same, and runs are whole or gone."""

import random
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime

import pytest
from sqlalchemy import func, insert, select

from inferry.domain.ledger import LedgerEntry, Outcome, RetentionPolicy
from inferry.ledger.queries import LedgerQueries
from inferry.ledger.reports import TenantSummary
from inferry.ledger.schema import attempts, gpu_rollups, gpu_time, rollups
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.opening import open_queries
from inferry.ledger.stores.retention import PASS_INTERVAL_S, RetentionStore
from ledger.builders import an_entry

DAY = 86_400.0
NOW = datetime(2026, 3, 30, 12, tzinfo=UTC).timestamp()
POLICY = RetentionPolicy(attempts_s=10 * DAY, gpu_time_s=10 * DAY, rollups_s=100 * DAY)
NO_LIMIT = RetentionPolicy(attempts_s=None, gpu_time_s=None, rollups_s=None)


@pytest.fixture
def database(ledger_url: str) -> Iterator[LedgerDatabase]:
    with closing(LedgerDatabase(ledger_url)) as database:
        yield database


@pytest.fixture
def ledger(ledger_url: str, database: LedgerDatabase) -> Iterator[AttemptStore]:
    with closing(AttemptStore(ledger_url)) as ledger:
        yield ledger


@pytest.fixture
def queries(ledger_url: str, ledger: AttemptStore) -> Iterator[LedgerQueries]:
    with open_queries(ledger_url) as queries:
        yield queries


def old(job: str, run: str, *, days: float = 20, **fields: object) -> LedgerEntry:
    return an_entry(job, run_id=run, ended_at=NOW - days * DAY, **fields)


def swept(
    database: LedgerDatabase, now: float = NOW, *, policy: RetentionPolicy = POLICY, step_rows: int = 1000
) -> int:
    """A whole pass; returns the number of its steps."""
    store = RetentionStore(database, policy, step_rows=step_rows)
    steps = 1
    while store.sweep(now, 100):
        steps += 1
        assert steps < 10_000
    return steps


def kept(queries: LedgerQueries) -> set[str]:
    return {entry.job_id for entry in queries.jobs(limit=100_000)}


def a_history(seed: int) -> list[LedgerEntry]:
    dice = random.Random(seed)
    history = []
    for number in range(400):
        run, tenant, key = f"run-{number // 4}", dice.choice("ab"), dice.choice([None, "k1", "k2"])
        for attempt in range(1, dice.choice([1, 1, 2]) + 1):
            history.append(
                an_entry(
                    number,
                    attempt=attempt,
                    tenant=tenant,
                    run_id=run,
                    key_id=key,
                    lane=dice.choice(["P0", "P2"]),
                    model=dice.choice(["m", "n"]),
                    outcome=dice.choice(list(Outcome)),
                    ended_at=NOW - dice.uniform(0, 28) * DAY,
                    prompt_tokens=dice.randrange(1000),
                    output_tokens=dice.randrange(100),
                    cost_nanos=dice.choice([None, dice.randrange(10**12)]),
                    gpu_seconds=dice.choice([None, dice.randrange(64) / 8]),
                    queue_ms=dice.choice([None, dice.randrange(64) / 8]),
                    batch_size=dice.choice([None, dice.randrange(64)]),
                    attained=dice.choice([None, True, False]),
                    shared_with=dice.choice([None, None, "other"]),
                )
            )
    return history


@pytest.mark.parametrize("step_rows", [3, 1000])
def test_spending_and_tenants_stay_the_same(
    database: LedgerDatabase, ledger: AttemptStore, queries: LedgerQueries, step_rows: int
) -> None:
    ledger.append(a_history(1))
    spending = [one for one in queries.query_spending(NOW) if one.period != "run"]
    assert {one.period for one in spending} == {"day", "month"}
    tenants, count = queries.tenants(), len(queries.jobs(limit=10_000))
    swept(database, step_rows=step_rows)
    assert len(queries.jobs(limit=10_000)) < count
    after = [one for one in queries.query_spending(NOW) if one.period != "run"]
    assert sorted(map(repr, after)) == sorted(map(repr, spending))
    assert [_rounded(one) for one in queries.tenants()] == [_rounded(one) for one in tenants]


def _rounded(one: TenantSummary) -> list[object]:
    values = [getattr(one, name) for name in one.__struct_fields__]
    return [round(value, 6) if isinstance(value, float) else value for value in values]


def test_a_pass_is_repeated_without_effect_and_comes_once_an_hour(
    database: LedgerDatabase, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    store = RetentionStore(database, POLICY)
    while store.sweep(NOW, 100):
        pass
    ledger.append([old("1", "r")])
    assert store.sweep(NOW + PASS_INTERVAL_S - 1, 100) == 0
    assert kept(queries) == {"1"}
    while store.sweep(NOW + PASS_INTERVAL_S, 100):
        pass
    assert kept(queries) == set()
    before = queries.tenants()
    swept(database)
    assert queries.tenants() == before


def test_a_run_is_deleted_whole_or_not_at_all(
    database: LedgerDatabase, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    ledger.append([old("1", "over"), old("2", "over", days=11), old("3", "used"), old("4", "used", days=9)])
    swept(database)
    assert kept(queries) == {"3", "4"}


def test_a_tree_is_deleted_from_its_root(
    database: LedgerDatabase, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    ledger.append(
        [
            old("1", "root", days=9),
            old("2", "child", parent_run="root"),
            old("3", "grandchild", parent_run="child"),
            old("4", "parent of one in use"),
            old("5", "in use", days=9, parent_run="parent of one in use"),
        ]
    )
    swept(database)
    assert kept(queries) == {"1", "2", "3", "4", "5"}
    assert queries.tree("acme", "root").runs == 3
    later = NOW + 5 * DAY
    swept(database, later)
    swept(database, later)
    swept(database, later)
    assert kept(queries) == set()


def test_rows_twice_as_old_are_deleted_in_any_case(
    database: LedgerDatabase, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    ledger.append([old("1", "r", days=21), old("2", "r", days=19), old("3", "r", days=1)])
    ledger.append([old("4", "x", days=21, parent_run="y"), old("5", "y", days=21, parent_run="x")])
    swept(database)
    assert kept(queries) == {"2", "3"}
    assert queries.tenants()[0].jobs == 5


def test_a_run_larger_than_a_step_counts_once(
    database: LedgerDatabase, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    ledger.append([old(str(number), "large", days=20 + number / 100) for number in range(50)])
    ledger.append([old(f"small {number}", f"small {number}", days=15) for number in range(20)])
    assert swept(database, step_rows=7) >= 10
    (tenant,) = queries.tenants()
    assert (tenant.runs, tenant.jobs, tenant.attempts) == (21, 70, 70)
    assert kept(queries) == set()


def test_many_rows_of_one_moment_that_are_kept_end_a_pass(
    database: LedgerDatabase, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    ledger.append([*(old(str(number), "used") for number in range(20)), old("new", "used", days=1)])
    swept(database, step_rows=5)
    assert len(kept(queries)) == 21


def test_gpu_time_is_summed_by_hour_worker_and_kind(database: LedgerDatabase) -> None:
    begin = NOW - 20 * DAY
    with database.writing() as connection:
        rows = [
            {
                "worker": "w",
                "started_at": begin + 10 * n,
                "ended_at": begin + 10 * n + 10,
                "kind": kind,
                "gpu_seconds": 5,
            }
            for n in range(720)
            for kind in ("work", "idle")
        ]
        connection.execute(insert(gpu_time), rows)
    swept(database, step_rows=100)
    with database.reading() as connection:
        assert connection.execute(select(func.count()).select_from(gpu_time)).scalar() == 0
        found = connection.execute(select(gpu_rollups).order_by(gpu_rollups.c.hour, gpu_rollups.c.kind)).all()
    assert [tuple(row) for row in found] == [
        (begin + hour * 3600, "w", kind, 1800.0) for hour in (0, 1) for kind in ("idle", "work")
    ]


def test_roll_ups_are_deleted_in_their_turn_and_nothing_without_a_limit(
    database: LedgerDatabase, ledger: AttemptStore, queries: LedgerQueries
) -> None:
    ledger.append([old("1", "r", days=99), old("2", "s", days=101)])
    swept(database, policy=NO_LIMIT)
    assert kept(queries) == {"1", "2"}
    swept(database)
    with database.reading() as connection:
        assert connection.execute(select(rollups.c.hour)).scalars().all() == [int((NOW - 99 * DAY) // 3600 * 3600)]
        assert connection.execute(select(func.count()).select_from(attempts)).scalar() == 0
