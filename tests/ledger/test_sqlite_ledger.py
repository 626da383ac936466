"""The SQLite ledger: complete, idempotent, and intact after crashes."""

import os
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.ledger.recorder import Recorder
from inferry.ledger.schema import SCHEMA_VERSION, attempts
from inferry.ledger.stores.sqlite import LedgerMissing, LedgerUnusable, SqliteLedger, open_sqlite_queries
from ledger.builders import an_entry, entries


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def ledger(url: str) -> Iterator[SqliteLedger]:
    with closing(SqliteLedger(url)) as ledger:
        yield ledger


def everything_in(url: str) -> list[LedgerEntry]:
    with open_sqlite_queries(url) as queries:
        return sorted(queries.jobs(limit=1_000_000), key=lambda entry: (entry.job_id, entry.attempt))


FULL = an_entry(
    "full",
    attempt=3,
    outcome=Outcome.FAILED,
    ended_at=1_700_000_000.125,
    prompt_tokens=1000,
    cached_tokens=600,
    output_tokens=77,
    gpu_seconds=0.25,
    queue_ms=12.5,
    first_token_ms=80.25,
    total_ms=900.5,
    batch_size=8,
    release_reason="window",
    worker="gpu-a",
    parent_run="run-0",
    finish="stop",
    error_code="worker_lost",
    request_id="req-1",
)


def test_the_table_holds_every_field_of_an_entry() -> None:
    assert tuple(column.name for column in attempts.columns) == LedgerEntry.__struct_fields__


def test_an_entry_comes_back_as_it_went_in(ledger: SqliteLedger, url: str) -> None:
    bare = an_entry("bare")
    ledger.append([FULL, bare])
    assert everything_in(url) == [bare, FULL]


def test_appending_the_same_attempt_twice_changes_nothing(ledger: SqliteLedger, url: str) -> None:
    first = an_entry(1, output_tokens=5)
    again = msgspec.structs.replace(first, output_tokens=999)
    retried = msgspec.structs.replace(first, attempt=2)
    ledger.append([first])
    ledger.append([again, retried])
    ledger.append([retried])
    assert everything_in(url) == [first, retried]


def test_nothing_of_a_batch_is_kept_when_one_entry_cannot_be(ledger: SqliteLedger, url: str) -> None:
    for hopeless in (
        an_entry("surrogate", run_id="\ud800"),
        an_entry("huge", prompt_tokens=2**70),
        an_entry("no-run", run_id=None),
        an_entry("not-a-time", ended_at=float("nan")),
    ):
        with pytest.raises((ValueError, OverflowError)):
            ledger.append([an_entry("good"), hopeless])
    assert everything_in(url) == []
    ledger.append([an_entry("good")])
    assert everything_in(url) == [an_entry("good")]


def test_an_empty_batch_is_fine(ledger: SqliteLedger, url: str) -> None:
    ledger.append([])
    assert everything_in(url) == []


def test_a_ledger_goes_on_where_it_stopped(url: str) -> None:
    for number in range(3):
        with closing(SqliteLedger(url)) as ledger:
            ledger.append([an_entry(number)])
    assert everything_in(url) == entries(3)


def test_closing_twice_is_fine(url: str) -> None:
    ledger = SqliteLedger(url)
    ledger.close()
    ledger.close()


def test_the_file_is_in_wal_mode_with_its_version_and_indexes(ledger: SqliteLedger, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        indexes = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    assert {"attempts_by_run", "attempts_by_end"} <= indexes


def test_a_newer_schema_is_refused_by_writer_and_reader(path: Path, url: str) -> None:
    SqliteLedger(url).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    for opened in (SqliteLedger, open_sqlite_queries):
        with pytest.raises(LedgerUnusable, match="newer release"):
            opened(url)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnusable, match=r"directory .* does not exist: .*/nowhere"):
        SqliteLedger(f"sqlite:///{tmp_path}/nowhere/ledger.db")


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(path: Path, url: str) -> None:
    path.write_bytes(b"dear diary " * 1000)
    with pytest.raises(LedgerUnusable, match="not a database"):
        SqliteLedger(url)
    with pytest.raises(LedgerUnusable, match="not a database"):
        open_sqlite_queries(url)
    assert path.read_bytes() == b"dear diary " * 1000
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    with pytest.raises(LedgerUnusable, match="not a ledger"):
        SqliteLedger(url)


@pytest.mark.parametrize("url", ["ledger.db", "postgresql://host/db", ""])
def test_an_address_that_is_not_sqlite_is_refused(url: str) -> None:
    with pytest.raises(LedgerUnusable, match=r"not a (URL|SQLite URL)"):
        SqliteLedger(url)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(LedgerUnusable) as caught:
        SqliteLedger("postgresql://me:secret@host/db")
    assert "secret" not in str(caught.value)


def test_reading_creates_nothing(path: Path, url: str) -> None:
    with pytest.raises(LedgerMissing, match=r"no ledger at /.*ledger\.db"):
        open_sqlite_queries(url)
    assert not path.exists()


def test_a_ledger_in_memory_serves_the_recorder_thread() -> None:
    recorder = Recorder(SqliteLedger("sqlite:///:memory:"))
    recorder.record(an_entry())
    recorder.close()
    assert (recorder.written, recorder.dropped) == (1, 0)


def test_several_may_open_a_new_ledger_at_once(url: str) -> None:
    start = threading.Barrier(8)
    faults: list[BaseException] = []

    def open_and_write(number: int) -> None:
        start.wait(20)
        try:
            with closing(SqliteLedger(url)) as ledger:
                ledger.append([an_entry(number)])
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=open_and_write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert faults == []
    assert everything_in(url) == entries(8)


def test_writes_continue_during_a_read(ledger: SqliteLedger, path: Path) -> None:
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
    recorder = Recorder(SqliteLedger(url), flush_interval_s=0.0)
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
from inferry.ledger.stores.sqlite import SqliteLedger
from inferry.domain.ledger import LedgerEntry, Outcome

ledger = SqliteLedger(sys.argv[1])
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
        with open_sqlite_queries(url) as queries:
            sizes = {int(run.run_id.removeprefix("batch-")): run.jobs for run in queries.runs(limit=1_000_000)}
        assert set(sizes.values()) == {BATCH}
        assert acknowledged <= set(sizes)
        assert len(set(sizes) - acknowledged) <= life + 1
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
