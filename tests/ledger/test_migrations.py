"""Ledgers of earlier releases are migrated: tables, columns and indexes are those of a new ledger, rows are kept."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Connection, inspect

from inferry.domain.ledger import LedgerUnusable
from inferry.domain.ledger_urls import is_postgresql
from inferry.ledger import migrations, schema
from inferry.ledger.schema import SCHEMA_VERSION
from inferry.ledger.stores import postgres, sqlite_open
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import connect, open_queries
from ledger.builders import an_entry


def shape(url: str) -> dict[str, Any]:
    """Tables with their columns and indexes.

    Without collations, which an upgrade does not set: no ledger in PostgreSQL is older than roll-ups.
    """
    with closing(connect(url)) as connector, connector.reading() as connection:
        found = inspect(connection)
        return {
            table: (
                {
                    one["name"]: (str(one["type"]).partition(" ")[0], one["nullable"])
                    for one in found.get_columns(table)
                },
                {index["name"]: index["column_names"] for index in found.get_indexes(table)},
            )
            for table in found.get_table_names()
        }


def change(url: str, version: int, work: Callable[[Connection], None]) -> None:
    """Make a ledger of another version of it."""
    with closing(connect(url)) as connector, connector.writing() as connection:
        work(connection)
        connection.exec_driver_sql(
            f"UPDATE inferry_schema SET version = {version}"
            if is_postgresql(url)
            else f"PRAGMA user_version = {version}"
        )


def to_version_6(connection: Connection) -> None:
    for statement in (
        "DROP TABLE rollups",
        # Added again, it is the last column.
        "ALTER TABLE attempts DROP COLUMN batching_ms",
        "ALTER TABLE attempts ADD COLUMN batching_ms FLOAT",
        "DROP TABLE gpu_rollups",
        "ALTER TABLE attempts DROP COLUMN decision",
        "DROP TABLE provider_batches",
        "DROP INDEX documents_by_kind",
        "ALTER TABLE batch_items DROP COLUMN provider_batch",
        "ALTER TABLE attempts DROP COLUMN settings_version",
        "ALTER TABLE attempts DROP COLUMN composed",
        "DROP INDEX attempts_by_run",
        "DROP INDEX attempts_by_parent",
        "DROP INDEX async_jobs_by_status",
        "CREATE INDEX async_jobs_by_status ON async_jobs (status, tenant)",
        "CREATE INDEX attempts_by_run ON attempts (tenant, run_id)",
        "CREATE INDEX attempts_by_parent ON attempts (tenant, parent_run) WHERE parent_run IS NOT NULL",
    ):
        connection.exec_driver_sql(statement)


def test_the_schema_before_roll_ups_becomes_that_of_a_new_ledger(ledger_url: str) -> None:
    with closing(AttemptStore(ledger_url)) as ledger:
        ledger.append([an_entry()])
    wanted = shape(ledger_url)
    change(ledger_url, 6, to_version_6)
    with pytest.raises(LedgerUnusable, match="of an earlier release"):
        open_queries(ledger_url)
    assert shape(ledger_url) == wanted
    later = an_entry("later", ended_at=2_000.0, batching_ms=1.5, attained=True, decision="why")
    with closing(AttemptStore(ledger_url)) as ledger:
        ledger.append([later])
    with open_queries(ledger_url) as queries:
        assert queries.jobs() == [later, an_entry()]
        assert queries.tenants()[0].jobs == 2


def test_a_column_that_a_later_release_adds_is_added_once(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(AttemptStore(ledger_url)) as ledger:
        ledger.append([an_entry()])
    for module in (schema, migrations, sqlite_open, postgres):
        monkeypatch.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    step = (("attempts", "ALTER TABLE attempts ADD COLUMN colour TEXT"), ("missing", "DROP TABLE keys"))
    monkeypatch.setitem(schema.UPGRADES, SCHEMA_VERSION, step)
    for _ in range(2):
        columns, _ = shape(ledger_url)["attempts"]
        assert columns["colour"] == ("TEXT", True)
    with open_queries(ledger_url) as queries:
        assert queries.jobs() == [an_entry()]


def test_a_migration_that_fails_changes_nothing(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    AttemptStore(ledger_url).close()
    wanted = shape(ledger_url)
    with monkeypatch.context() as patched:
        for module in (schema, migrations, sqlite_open, postgres):
            patched.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        step = (
            ("attempts", "ALTER TABLE attempts ADD COLUMN colour TEXT"),
            ("attempts", "ALTER TABLE nothing RENAME TO x"),
        )
        patched.setitem(schema.UPGRADES, SCHEMA_VERSION, step)
        with pytest.raises(LedgerUnusable):
            AttemptStore(ledger_url)
    assert shape(ledger_url) == wanted
