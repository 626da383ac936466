"""Items of batches in the database, and the window of items in flight."""

from contextlib import closing

from inferry.domain.storage import Batch, BatchDetail, BatchItem, ItemResult
from inferry.durable.window import Window
from inferry.ledger.stores.batches import BatchStore
from inferry.ledger.stores.database import LedgerDatabase


def a_batch(total: int) -> Batch:
    return Batch(
        id="b",
        tenant="t",
        key_id=None,
        api="anthropic",
        status="in_progress",
        endpoint="/v1/x",
        created_at=0.0,
        deadline=1.0,
        detail=BatchDetail(),
        total=total,
    )


def test_a_result_is_written_once(ledger_url: str) -> None:
    with closing(LedgerDatabase(ledger_url)) as database:
        store = BatchStore(database)
        store.create(a_batch(2), [BatchItem(1, "a", b"{}"), BatchItem(2, "b", b"{}")], None)
        store.record([ItemResult("b", 1, "succeeded", b"first")])
        store.record([ItemResult("b", 1, "errored", b"second")])
        assert store.end_pending("b", "canceled") == 1
        store.record([ItemResult("b", 2, "succeeded", b"late")])
        found = store.load("b")
        assert found is not None
        assert (found.completed, found.failed) == (1, 1)
        outcomes = [(one.outcome, one.line) for one in store.outcomes("b", 0, 1000)]
        assert outcomes == [("succeeded", b"first"), ("canceled", None)]


def test_pages_are_limited_in_bytes_and_never_empty_before_the_end(ledger_url: str) -> None:
    with closing(LedgerDatabase(ledger_url)) as database:
        store = BatchStore(database)
        store.create(a_batch(10), [BatchItem(number, str(number), b"x" * 100) for number in range(1, 11)], None)
        assert [item.number for item in store.pending("b", 0, 100, 250)] == [1, 2, 3]
        assert [item.number for item in store.pending("b", 3, 100, 1)] == [4]
        assert [item.number for item in store.pending("b", 8, 100, 10_000)] == [9, 10]
        assert store.pending("b", 10, 100, 10_000) == []


def test_the_window_shrinks_to_what_was_admitted_and_grows_again() -> None:
    window = Window()
    assert window.allows(63, 64, 0.0)
    assert not window.allows(64, 64, 0.0)
    window.refused(4, retry_at=10.0)
    assert not window.allows(0, 64, 9.0)
    assert window.allows(3, 64, 10.0)
    assert not window.allows(4, 64, 10.0)
    window.answered()
    assert window.allows(3, 64, 0.0), "a place is free before the time to retry"
    for _ in range(8):
        window.answered()
    assert window.allows(4, 64, 0.0)
    window.refused(0, retry_at=0.0)
    assert window.allows(0, 64, 0.0), "never less than one"
