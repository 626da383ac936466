"""What only the PostgreSQL ledger does: locks, connections that are lost, a server that is stopped."""

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from inferry.domain.ledger import LedgerLocked, LedgerMissing, LedgerUnusable
from inferry.domain.ledger_urls import shown_ledger_url
from inferry.domain.spending import Watermark, WatermarkBatch
from inferry.ledger.recorder import Recorder
from inferry.ledger.schema import SCHEMA_VERSION
from inferry.ledger.stores import postgres as module
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from inferry.ledger.stores.tenants import TenantStore
from inferry.ledger.stores.watermarks import WatermarkStore
from ledger.builders import an_entry, entries
from support.postgres import PostgresServer

MARK = Watermark(scope="run", tenant="a", name="r", period="run", number=0, tokens=1, nanos=2, at=3.0)
END_CONNECTIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = "
    "current_database()"
)


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may stop."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.0)


def test_no_message_contains_the_password() -> None:
    url = "postgresql://me:secret@127.0.0.1:1/db?connect_timeout=2"
    for opened in (AttemptStore, open_queries):
        with pytest.raises(LedgerUnusable, match=r"cannot use the ledger postgresql://me@127\.0\.0\.1:1/db") as caught:
            opened(url)
        assert "secret" not in str(caught.value)
    assert shown_ledger_url(url) == "postgresql://me@127.0.0.1:1/db"
    assert shown_ledger_url("postgresql:///db?password=secret") == "postgresql:///db"


def test_tables_of_another_application_are_refused_and_left_alone(postgres: PostgresServer, postgres_url: str) -> None:
    postgres.execute("CREATE TABLE keys (name text)", postgres_url)
    with pytest.raises(LedgerUnusable, match=r"not a ledger's \(keys\)"):
        AttemptStore(postgres_url)
    with pytest.raises(LedgerMissing, match="contains no ledger yet"):
        open_queries(postgres_url)
    assert postgres.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", postgres_url) == [("keys",)]


def test_a_newer_schema_is_refused_by_writer_and_reader(postgres: PostgresServer, postgres_url: str) -> None:
    AttemptStore(postgres_url).close()
    postgres.execute(f"UPDATE inferry_schema SET version = {SCHEMA_VERSION + 1}", postgres_url)
    for opened in (AttemptStore, open_queries):
        with pytest.raises(LedgerUnusable, match="newer release"):
            opened(postgres_url)


def test_queries_cannot_write(postgres_url: str) -> None:
    AttemptStore(postgres_url).close()
    with open_queries(postgres_url) as queries, queries._engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW default_transaction_read_only").scalar() == "on"


def test_schemas_of_one_database_are_ledgers_of_their_own(postgres: PostgresServer, postgres_url: str) -> None:
    postgres.execute("CREATE SCHEMA other", postgres_url)
    other_url = f"{postgres_url}&options=-c%20search_path%3Dother"
    with (
        closing(WatermarkStore(postgres_url, exclusive=True)) as store,
        closing(WatermarkStore(other_url, exclusive=True)) as other,
    ):
        store.write(WatermarkBatch(1, [MARK], []))
        assert other.read() == []


@pytest.mark.usefixtures("short_wait")
def test_a_second_gateway_is_refused_until_the_first_is_gone(postgres_url: str) -> None:
    with closing(WatermarkStore(postgres_url, exclusive=True)):
        with pytest.raises(LedgerLocked, match="another gateway already uses this ledger"):
            WatermarkStore(postgres_url, exclusive=True)
        with closing(TenantStore(postgres_url)) as tenants:
            tenants.create_key("acme", now=1.0)  # commands need no lock
    with closing(WatermarkStore(postgres_url, exclusive=True)) as store:
        store.write(WatermarkBatch(1, [MARK], []))


@pytest.mark.usefixtures("short_wait")
def test_a_lost_connection_is_replaced_and_the_lock_taken_again(postgres: PostgresServer, postgres_url: str) -> None:
    with closing(WatermarkStore(postgres_url, exclusive=True)) as store, closing(TenantStore(postgres_url)) as tenants:
        postgres.execute(END_CONNECTIONS, postgres_url)
        store.write(WatermarkBatch(1, [MARK], []))
        assert store.read() == [MARK]
        assert tenants.version() == 0
        with pytest.raises(LedgerLocked):
            WatermarkStore(postgres_url, exclusive=True)


def test_a_gateway_that_lost_its_lock_to_another_writes_no_watermark(
    postgres: PostgresServer, postgres_url: str
) -> None:
    with closing(WatermarkStore(postgres_url, exclusive=True)) as store:
        postgres.execute(END_CONNECTIONS, postgres_url)
        with closing(WatermarkStore(postgres_url, exclusive=True)) as other:
            with pytest.raises(LedgerLocked):
                store.write(WatermarkBatch(1, [MARK], []))
            assert other.read() == []
        store.write(WatermarkBatch(1, [MARK], []))
        assert store.read() == [MARK]


def test_rows_recorded_while_the_server_is_stopped_are_written_when_it_is_back(own_server: PostgresServer) -> None:
    url = own_server.database()
    recorder = Recorder(AttemptStore(url), flush_interval_s=0.0)
    for entry in entries(10):
        recorder.record(entry)
    assert recorder.flush(120)
    own_server.stop("immediate")
    for entry in entries(5000, first=10):
        recorder.record(entry)
    assert not recorder.flush(0.5)
    assert recorder.buffered == 5000
    own_server.start()
    assert recorder.flush(120)
    recorder.close()
    assert (recorder.written, recorder.dropped) == (5010, 0)
    with open_queries(url) as queries:
        assert len({entry.job_id for entry in queries.jobs(limit=10_000)}) == 5010


def test_an_entry_that_cannot_be_stored_costs_no_other(postgres_url: str) -> None:
    recorder = Recorder(AttemptStore(postgres_url))
    for entry in (an_entry("good"), an_entry("bad", run_id="a\0b"), an_entry("fine"), an_entry("huge", attempt=2**40)):
        recorder.record(entry)
    recorder.close()
    assert (recorder.written, recorder.dropped) == (2, 2)
    with open_queries(postgres_url) as queries:
        assert {entry.job_id for entry in queries.jobs()} == {"good", "fine"}


def test_the_event_loop_gets_its_turn_between_the_rows_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: seen.append("pause")))
    for row in module._in_turns((number,) for number in range(40)):
        seen.append(f"row {row[0]}")
    assert [what for what in seen if what != "pause"] == [f"row {number}" for number in range(40)]
    assert [number for number, what in enumerate(seen) if what == "pause"] == [16, 33]
