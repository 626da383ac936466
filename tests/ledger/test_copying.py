"""A ledger is copied whole, into an empty one, and not while a gateway uses it."""

from pathlib import Path

import pytest
from sqlalchemy import select

from inferry.domain.ledger import LedgerLocked, LedgerUnusable
from inferry.ledger.copying import ROWS_PER_INSERT, copy_ledger
from inferry.ledger.schema import changes
from inferry.ledger.stores.opening import connect, exclusive_use

ROWS = [(f"row {number}", number) for number in range(ROWS_PER_INSERT + 3)]


@pytest.fixture
def source(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'source.db'}"
    fill(url)
    return url


def fill(url: str) -> None:
    ledger = connect(url)
    with ledger.writing() as connection:
        connection.execute(changes.insert(), [{"of": name, "version": number} for name, number in ROWS])
    ledger.close()


def rows(url: str) -> list[tuple[str, int]]:
    ledger = connect(url)
    with ledger.reading() as connection:
        found = [(name, number) for name, number in connection.execute(select(changes))]
    ledger.close()
    return sorted(found)


def test_every_row_is_copied(source: str, tmp_path: Path, postgres_url: str) -> None:
    for target in (postgres_url, f"sqlite:///{tmp_path / 'target.db'}"):
        assert copy_ledger(source, target)["changes"] == len(ROWS)
        assert rows(target) == sorted(ROWS)
    assert rows(source) == sorted(ROWS)


def test_a_ledger_with_rows_is_not_written_to(source: str, tmp_path: Path) -> None:
    target = f"sqlite:///{tmp_path / 'target.db'}"
    fill(target)
    with pytest.raises(LedgerUnusable, match="empty database"):
        copy_ledger(source, target)
    assert rows(target) == sorted(ROWS)


def test_a_ledger_that_a_gateway_uses_is_not_copied(source: str, tmp_path: Path) -> None:
    with exclusive_use(source), pytest.raises(LedgerLocked):
        copy_ledger(source, f"sqlite:///{tmp_path / 'target.db'}")


def test_a_ledger_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnusable):
        copy_ledger(f"sqlite:///{tmp_path / 'absent.db'}", f"sqlite:///{tmp_path / 'target.db'}")
    assert not (tmp_path / "absent.db").exists()
