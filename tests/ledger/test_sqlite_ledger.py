"""The SQLite ledger: complete, idempotent, and intact after crashes."""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event

from inferry.domain.ledger import LedgerEntry, LedgerMissing, LedgerUnusable
from inferry.ledger.recorder import Recorder
from inferry.ledger.schema import SCHEMA_VERSION
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from ledger.builders import an_entry, entries


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def ledger(url: str) -> Iterator[AttemptStore]:
    with closing(AttemptStore(url)) as ledger:
        yield ledger


def everything_in(url: str) -> list[LedgerEntry]:
    with open_queries(url) as queries:
        return sorted(queries.jobs(limit=1_000_000), key=lambda entry: (entry.job_id, entry.attempt))


def test_the_file_is_in_wal_mode_with_its_version_and_indexes(ledger: AttemptStore, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        indexes = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    assert {"attempts_by_run", "attempts_by_end"} <= indexes


@pytest.mark.parametrize(("rows", "statements"), [(1, 1), (32, 1), (300, 11), (1000, 32)])
def test_a_batch_takes_few_statements_with_few_values(
    ledger: AttemptStore, url: str, rows: int, statements: int
) -> None:
    inserted: list[int] = []

    def note(connection: Connection, _cursor: object, _text: str, values: tuple[object, ...], *_: object) -> None:
        # Threads of other tests may still write to other ledgers.
        if str(connection.engine.url) == url:
            inserted.append(len(values))

    batch = [an_entry(f"job-{number}") for number in range(rows)]
    event.listen(Engine, "before_cursor_execute", note)
    try:
        ledger.append(batch)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert len(inserted) == statements
    assert max(inserted) <= 32 * len(LedgerEntry.__struct_fields__), "the event loop waits while values are bound"
    assert [entry.job_id for entry in everything_in(url)] == sorted(entry.job_id for entry in batch)


def test_a_newer_schema_is_refused_by_writer_and_reader(path: Path, url: str) -> None:
    AttemptStore(url).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    for opened in (AttemptStore, open_queries):
        with pytest.raises(LedgerUnusable, match="newer release"):
            opened(url)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnusable, match=r"directory .* does not exist: .*/nowhere"):
        AttemptStore(f"sqlite:///{tmp_path}/nowhere/ledger.db")


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(path: Path, url: str) -> None:
    path.write_bytes(b"dear diary " * 1000)
    with pytest.raises(LedgerUnusable, match="not a database"):
        AttemptStore(url)
    with pytest.raises(LedgerUnusable, match="not a database"):
        open_queries(url)
    assert path.read_bytes() == b"dear diary " * 1000
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    with pytest.raises(LedgerUnusable, match="not a ledger"):
        AttemptStore(url)


@pytest.mark.parametrize("url", ["ledger.db", "mysql://host/db", "postgres://me:secret@host/db", ""])
def test_an_address_of_another_kind_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(LedgerUnusable, match="must be a URL of the form") as caught:
        AttemptStore(url)
    assert "secret" not in str(caught.value)


def test_reading_creates_nothing(path: Path, url: str) -> None:
    with pytest.raises(LedgerMissing, match=r"no ledger at /.*ledger\.db"):
        open_queries(url)
    assert not path.exists()


def test_a_ledger_in_memory_serves_the_recorder_thread() -> None:
    recorder = Recorder(AttemptStore("sqlite:///:memory:"))
    recorder.record(an_entry())
    recorder.close()
    assert (recorder.written, recorder.dropped) == (1, 0)


def test_writes_continue_during_a_read(ledger: AttemptStore, path: Path) -> None:
    ledger.append(entries(10))
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM attempts").fetchone() == (10,)
        ledger.append(entries(10, first=10))
        assert reader.execute("SELECT count(*) FROM attempts").fetchone() == (10,)
        reader.rollback()
        assert reader.execute("SELECT count(*) FROM attempts").fetchone() == (20,)


def test_a_locked_file_costs_the_recorder_no_entry(url: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferry.ledger.stores.sqlite_open.BUSY_TIMEOUT_MS", 1)
    recorder = Recorder(AttemptStore(url), flush_interval_s=0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as bully:
        bully.execute("BEGIN IMMEDIATE")
        for entry in entries(10):
            recorder.record(entry)
        assert not recorder.flush(0.1)
        bully.execute("ROLLBACK")
    assert recorder.flush(120)
    recorder.close()
    assert everything_in(url) == entries(10)


BATCH = 50
WRITER = f"""
import itertools, sys
from inferry.ledger.stores.attempts import AttemptStore
from inferry.domain.ledger import LedgerEntry, Outcome

ledger = AttemptStore(sys.argv[1])
for batch in itertools.count(int(sys.argv[2])):
    ledger.append([
        LedgerEntry(
            job_id=f"{{batch}}/{{number}}", attempt=1, tenant="acme", run_id=f"batch-{{batch}}", step_id="s",
            model="tiny", lane="P1", outcome=Outcome.DONE, ended_at=float(batch),
        )
        for number in range({BATCH})
    ])
    sys.stdout.write(f"{{batch}}\\n")
    sys.stdout.flush()
"""


def test_a_killed_writer_leaves_every_acknowledged_batch_and_no_half_one(path: Path, url: str) -> None:
    dice = random.Random()
    acknowledged: set[int] = set()
    for life in range(4):
        first = life * 1_000_000
        writer = subprocess.Popen([sys.executable, "-c", WRITER, url, str(first)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        with writer, writer.stdout as acknowledgements:
            for _ in range(dice.randrange(1, 60)):
                acknowledged.add(int(acknowledgements.readline()))
            # Some way into whatever it is doing now.
            for _ in range(dice.randrange(20_000)):
                os.getpid()
            writer.kill()
            acknowledged.update(int(line) for line in acknowledgements if line.endswith("\n"))
        assert writer.returncode == -9
        # A reader is the first to open the file after the crash.
        with open_queries(url) as queries:
            sizes = {int(run.run_id.removeprefix("batch-")): run.jobs for run in queries.runs(limit=1_000_000)}
        assert set(sizes.values()) == {BATCH}
        assert acknowledged <= set(sizes)
        assert len(set(sizes) - acknowledged) <= life + 1
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
