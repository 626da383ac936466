"""Watermarks: the last written value counts, and files of earlier releases get the table."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from inferry.domain.ledger import LedgerFileLost
from inferry.domain.spending import Watermark, WatermarkBatch
from inferry.ledger.schema import SCHEMA_VERSION
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.watermarks import WatermarkStore
from support.old_schemas import undo_upgrades


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def a_mark(tokens: int = 1, *, name: str = "r", scope: str = "run", number: int = 0) -> Watermark:
    return Watermark(
        scope=scope, tenant="a", name=name, period="run", number=number, tokens=tokens, nanos=2**62, at=1.0
    )


def test_a_watermark_is_the_last_value_written_and_absent_when_deleted(ledger_url: str) -> None:
    with closing(WatermarkStore(ledger_url)) as store:
        store.write(WatermarkBatch(1, [a_mark(1), a_mark(5, name="s")], []))
        store.write(WatermarkBatch(2, [a_mark(7)], []))
        assert {mark.name: mark.tokens for mark in store.read()} == {"r": 7, "s": 5}
        store.write(WatermarkBatch(3, [a_mark(8, name="t")], [a_mark(), a_mark(name="never written")]))
        assert {mark.name: mark.tokens for mark in store.read()} == {"s": 5, "t": 8}


def test_watermarks_of_a_key_and_of_a_run_with_one_name_are_two(ledger_url: str) -> None:
    with closing(WatermarkStore(ledger_url)) as store:
        store.write(WatermarkBatch(1, [a_mark(1), a_mark(2, scope="key"), a_mark(3, number=1)], []))
        assert sorted(mark.tokens for mark in store.read()) == [1, 2, 3]


def test_another_connection_sees_a_batch_once_it_is_written(ledger_url: str) -> None:
    with closing(WatermarkStore(ledger_url)) as store, closing(WatermarkStore(ledger_url)) as other:
        store.write(WatermarkBatch(1, [a_mark(2**63 - 1)], []))
        assert other.read() == [a_mark(2**63 - 1)]


def test_a_ledger_of_the_second_schema_gets_the_table_and_keeps_its_rows(tmp_path: Path, url: str) -> None:
    AttemptStore(url).close()
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("DROP TABLE watermarks")
        raw.execute("INSERT INTO changes VALUES ('tenants', 7)")
        undo_upgrades(raw, 2)
        raw.execute("INSERT INTO tenants VALUES ('acme', '{}', 'salt', 0, 0)")
        raw.commit()
    with closing(WatermarkStore(url)) as store:
        assert store.read() == []
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert raw.execute("SELECT version FROM changes").fetchone() == (7,)
        assert raw.execute("SELECT name, weight FROM tenants").fetchone() == ("acme", 1.0)


def test_a_store_whose_file_was_replaced_uses_the_one_that_is_there(tmp_path: Path, url: str) -> None:
    with closing(WatermarkStore(url)) as store:
        store.write(WatermarkBatch(1, [a_mark()], []))
        for file in tmp_path.iterdir():
            file.unlink()
        with pytest.raises(LedgerFileLost, match=r"ledger\.db was deleted"):
            store.read()
        AttemptStore(url).close()
        assert store.read() == []
        store.write(WatermarkBatch(2, [a_mark(3)], []))
        with closing(WatermarkStore(url)) as other:
            assert other.read() == [a_mark(3)]


def test_a_file_that_is_not_a_database_is_reported_in_words(tmp_path: Path, url: str) -> None:
    with closing(WatermarkStore(url)) as store:
        for file in tmp_path.iterdir():
            file.unlink()
        (tmp_path / "ledger.db").write_bytes(b"this is no database, whatever it is called" * 100)
        with pytest.raises(LedgerFileLost, match="was replaced"):
            store.read()
