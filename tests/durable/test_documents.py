"""Stored documents: scoped by tenant, with a bounded life."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from inferry.domain.clock import ManualClock
from inferry.domain.errors import Conflict, LedgerUnavailable
from inferry.domain.storage import Document
from inferry.durable.documents import Documents
from inferry.durable.executor import StoreExecutor
from inferry.durable.sweeper import SLICE, Sweeper
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.documents import DocumentStore
from support.old_schemas import undo_upgrades


@pytest.fixture
def store(ledger_url: str) -> Iterator[DocumentStore]:
    with closing(LedgerDatabase(ledger_url)) as database:
        yield DocumentStore(database)


def a_document(id: str = "a", tenant: str = "acme", created_at: float = 0.0, **more: object) -> Document:
    return Document(tenant=tenant, kind="response", id=id, content=b"{}", created_at=created_at, **more)  # type: ignore[arg-type]


def test_a_document_comes_back_to_its_own_tenant_only(store: DocumentStore) -> None:
    store.put(a_document())
    assert store.get("acme", "response", "a", now=1.0) == a_document()
    assert store.get("other", "response", "a", now=1.0) is None
    assert store.get("acme", "conversation", "a", now=1.0) is None
    assert not store.delete("other", "response", "a")
    assert store.delete("acme", "response", "a")
    assert store.get("acme", "response", "a", now=1.0) is None


def test_a_document_is_replaced_unless_that_is_a_conflict(store: DocumentStore) -> None:
    store.put(a_document())
    store.put(a_document(created_at=5.0))
    found = store.get("acme", "response", "a", now=6.0)
    assert found is not None
    assert found.created_at == 5.0
    with pytest.raises(Conflict):
        store.put(a_document(), replace=False)


def test_of_two_that_replace_the_same_content_one_does(store: DocumentStore) -> None:
    store.put(a_document())
    first, second = (replace(a_document(created_at=5.0), content=content) for content in (b"first", b"second"))
    assert store.swap(first, b"{}")
    assert not store.swap(second, b"{}")
    assert store.get("acme", "response", "a", now=6.0) == first
    assert store.ids_of_kind("response") == {("acme", "a")}
    store.delete("acme", "response", "a")
    assert not store.swap(second, b"first")
    assert store.ids_of_kind("response") == frozenset()


def test_an_expired_document_is_not_found_and_swept_later(store: DocumentStore) -> None:
    store.put(a_document("old", expires_at=10.0))
    store.put(a_document("kept"))
    assert store.get("acme", "response", "old", now=10.0) is None
    assert [one.id for one in store.list("acme", "response", 10.0).rows] == ["kept"]
    assert store.sweep(10.0, 100) == 1
    assert store.sweep(10.0, 100) == 0


@pytest.mark.parametrize("newest_first", [True, False])
def test_pages_of_a_listing_cover_every_document_once(store: DocumentStore, newest_first: bool) -> None:
    ids = [f"{number:02}" for number in range(10)]
    for id in ids:
        store.put(a_document(id, created_at=float(int(id) // 3)))
    store.put(a_document("foreign", tenant="other"))
    seen: list[str] = []
    has_more = True
    while has_more:
        after = seen[-1] if seen else None
        page = store.list("acme", "response", 0.0, after=after, limit=3, newest_first=newest_first)
        seen += [one.id for one in page.rows]
        has_more = page.has_more
    assert seen == (ids[::-1] if newest_first else ids)


def test_the_listing_behind_an_unknown_document_is_empty(store: DocumentStore) -> None:
    store.put(a_document())
    page = store.list("acme", "response", 0.0, after="gone")
    assert (page.rows, page.has_more) == ([], False)


def test_all_documents_of_a_tenant_can_be_deleted(store: DocumentStore) -> None:
    store.put(a_document("1"))
    store.put(a_document("2"))
    store.put(a_document("3", tenant="other"))
    assert store.delete_tenant("acme") == 2
    assert store.get("other", "response", "3", now=0.0) is not None


@pytest.mark.parametrize("ledger_url", ["sqlite"], indirect=True)
def test_a_deleted_database_is_reported_as_unavailable(store: DocumentStore, tmp_path: Path) -> None:
    (tmp_path / "ledger.db").unlink()
    with pytest.raises(LedgerUnavailable):
        store.get("acme", "response", "a", now=0.0)


def test_documents_expire_by_the_clock_and_the_sweeper_deletes_all_of_them(
    store: DocumentStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inferry.durable.sweeper")
    clock = ManualClock()

    async def scenario() -> None:
        executor = StoreExecutor()
        documents = Documents(store, executor, clock)
        sweeper = Sweeper({"documents": store.sweep, "files": lambda now, limit: 0}, executor, clock)
        for number in range(SLICE + 5):
            await documents.put("acme", "response", str(number), b"{}", ttl_s=60.0)
        assert await sweeper.sweep() == 0
        clock.advance(60.0)
        assert await documents.get("acme", "response", "0") is None
        assert not (await documents.list("acme", "response")).rows
        assert not caplog.messages
        assert await sweeper.sweep() == SLICE + 5
        assert caplog.messages == ["deleted expired rows of documents"]
        assert not await documents.delete("acme", "response", "0")
        await executor.close()

    asyncio.run(scenario())


def test_a_database_of_the_earlier_schema_gets_its_index_and_column(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db'}"
    LedgerDatabase(url).close()
    with closing(sqlite3.connect(tmp_path / "db")) as raw:
        raw.execute("DROP INDEX documents_by_kind")
        undo_upgrades(raw, 5)
        raw.commit()
    LedgerDatabase(url).close()
    with closing(sqlite3.connect(tmp_path / "db")) as raw:
        indexes = {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        columns = {row[1] for row in raw.execute("PRAGMA table_info(batch_items)")}
    assert "documents_by_kind" in indexes
    assert "provider_batch" in columns
