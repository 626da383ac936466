"""The stores of content behave the same in SQLite and in PostgreSQL."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import event

from durable.async_work import a_job, a_job_with_callback
from inferry.domain.async_jobs import AsyncJob, Delivery, JobEnd, JobToCreate, JobTry
from inferry.domain.errors import Conflict, LedgerUnavailable, NotFound, QueueFull, StorageQuotaExceeded
from inferry.domain.storage import Batch, BatchDetail, BatchItem, ItemResult, ItemTry, StoredFile
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.batches import BatchStore
from inferry.ledger.stores.callback_secrets import CallbackSecretStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.files import FileStore
from ledger.builders import an_entry


@pytest.fixture
def database(ledger_url: str) -> Iterator[LedgerDatabase]:
    with closing(LedgerDatabase(ledger_url)) as database:
        yield database


def a_file(id: str = "f", tenant: str = "acme", **more: Any) -> StoredFile:
    given = {"status": "uploading", "purpose": "batch", "filename": "in.jsonl", "size": 0, "created_at": 1.0, **more}
    return StoredFile(id=id, tenant=tenant, **given)


def a_batch(id: str = "b", tenant: str = "acme", **more: Any) -> Batch:
    given = {"api": "openai", "status": "validating", "endpoint": "/v1/x", "created_at": 1.0, "deadline": 9.0, **more}
    return Batch(id=id, tenant=tenant, key_id=None, detail=BatchDetail(output_ttl_s=10.0), **given)


def test_a_file_is_written_in_chunks_seen_when_finished_and_swept_when_deleted(database: LedgerDatabase) -> None:
    store = FileStore(database)
    store.begin(a_file())
    chunks = [bytes([number]) * 1000 for number in range(3)]
    for number, chunk in enumerate(chunks):
        store.append(a_file(), number, chunk, None)
    assert store.get("acme", "f", 2.0) is None
    finished = store.finish(a_file(filename="named"))
    assert (finished.size, finished.filename, finished.status) == (3000, "named", "processed")
    assert store.get("acme", "f", 2.0) == finished
    assert store.get("other", "f", 2.0) is None
    assert [store.chunk("f", number) for number in range(4)] == [*chunks, None]
    assert store.used_bytes("acme") == 3000
    assert not store.delete("other", "f")
    assert store.delete("acme", "f")
    assert store.chunk("f", 0) is None
    assert [store.sweep(2.0, 2), store.sweep(2.0, 2), store.sweep(2.0, 2)] == [2, 2, 0]
    assert store.used_bytes("acme") == 0


def test_a_quota_and_a_deleted_upload_refuse_a_chunk(database: LedgerDatabase) -> None:
    store = FileStore(database)
    store.begin(a_file())
    store.append(a_file(), 0, b"x" * 60, 100)
    with pytest.raises(StorageQuotaExceeded):
        store.append(a_file(), 1, b"x" * 60, 100)
    assert store.discard_uploads() == 1
    with pytest.raises(NotFound):
        store.append(a_file(), 1, b"x", None)
    with pytest.raises(NotFound):
        store.finish(a_file())


def test_files_are_listed_by_creation_and_id_in_byte_order(database: LedgerDatabase) -> None:
    store = FileStore(database)
    for id in ("a", "B", "_", "b"):
        store.begin(a_file(id))
        store.finish(a_file(id))
    assert [one.id for one in store.list("acme", 2.0, newest_first=False).rows] == ["B", "_", "a", "b"]
    page = store.list("acme", 2.0, after="b", limit=2)
    assert ([one.id for one in page.rows], page.has_more) == (["a", "_"], True)
    assert store.delete_tenant("acme") == 4


def test_a_batch_from_its_items_to_its_files(database: LedgerDatabase, ledger_url: str) -> None:
    store, files = BatchStore(database), FileStore(database)
    store.create(a_batch(), [], None)
    assert store.add_items("b", [BatchItem(1, "x", b"1"), BatchItem(2, "x", b"2")]) == [BatchItem(2, "x", b"2")]
    store.clear_items("b")
    names = [BatchItem(number, f"r{number}", b"{}") for number in range(1, 5)]
    assert store.add_items("b", names) == []
    assert store.move("b", ("validating",), "in_progress", 2.0)
    assert not store.move("b", ("validating",), "failed", 2.0)
    store.record([ItemTry("b", 1, 1), ItemResult("b", 2, "succeeded", b"two"), ItemResult("b", 3, "errored", b"three")])
    store.record([ItemResult("b", 2, "errored", b"late")])
    with closing(AttemptStore(ledger_url)) as ledger:
        ledger.append([an_entry("b-1-1")])
    assert [(one.number, one.tries, one.is_charged) for one in store.pending("b", 0, 10, 10_000)] == [
        (1, 1, True),
        (4, 0, False),
    ]
    assert store.end_pending("b", "expired") == 2
    assert store.outcome_counts("b") == {"succeeded": 1, "errored": 1, "expired": 2}
    files.begin(a_file("out"))
    store.finish("b", 5.0, a_file("out"), None)
    found = store.get("acme", "openai", "b", 6.0)
    assert found is not None
    assert (found.status, found.output_file, found.total, found.completed, found.failed) == (
        "completed",
        "out",
        4,
        1,
        3,
    )
    assert files.get("acme", "out", 6.0) is not None
    assert store.unfinished() == []
    while store.sweep(6.0, 3):
        pass
    assert store.outcomes("b", 0, 1000) == []
    while store.sweep(20.0, 3):
        pass
    assert store.load("b") is None


def test_a_batch_over_the_quota_is_not_stored(database: LedgerDatabase) -> None:
    store = BatchStore(database)
    with pytest.raises(StorageQuotaExceeded):
        store.create(a_batch(size=11), [BatchItem(1, "x", b"1")], 10)
    assert store.load("b") is None
    store.create(a_batch(), [BatchItem(1, "x", b"1")], 10)
    assert store.delete_tenant("acme") == (1, ["b"])


def test_an_async_job_is_created_once_per_idempotency_key_and_within_limits(database: LedgerDatabase) -> None:
    store = AsyncJobStore(database)
    first = a_job("job_1", idempotency_key="once", request_hash=b"h")
    assert store.create(first, b"{}", None, 1) == first
    again = replace(first, id="job_2")
    assert store.create(again, b"{}", None, 1) == first
    with pytest.raises(Conflict):
        store.create(replace(again, request_hash=b"other"), b"{}", None, 1)
    with pytest.raises(QueueFull):
        store.create(a_job("job_3"), b"{}", None, 1)
    with pytest.raises(StorageQuotaExceeded):
        store.create(a_job("job_3"), b"{}", 3, None)
    store.create(a_job("job_3", tenant="other"), b"{}", 3, 1)
    assert [job.id for job in store.page(first.tenant, 0.0).rows] == ["job_1"]


def test_async_jobs_are_created_together_each_within_its_limits(database: LedgerDatabase) -> None:
    store = AsyncJobStore(database)
    store.create(a_job("job_0"), b"{}", None, None)
    keyed = a_job("job_1", idempotency_key="once", request_hash=b"h")
    found = store.create_many(
        [
            JobToCreate(keyed, b"{}"),
            JobToCreate(replace(keyed, id="job_2"), b"{}"),
            JobToCreate(replace(keyed, id="job_3", request_hash=b"other"), b"{}"),
            JobToCreate(a_job("job_4"), b"{}", quota_bytes=6, max_unfinished=3),
            JobToCreate(a_job("job_5"), b"{}", quota_bytes=6),
            JobToCreate(a_job("job_6"), b"{}", max_unfinished=3),
            JobToCreate(a_job("job_7", tenant="other"), b"{}", quota_bytes=6, max_unfinished=3),
            JobToCreate(a_job("job_8"), b"{}"),
        ]
    )
    results = [one.id if isinstance(one, AsyncJob) else type(one) for one in found.jobs]
    assert results == [
        "job_1",
        "job_1",
        Conflict,
        "job_4",
        StorageQuotaExceeded,
        QueueFull,
        "job_7",
        "job_8",
    ]
    assert found.left_bytes == {keyed.tenant: -2, "other": 4}
    assert found.left_jobs == {keyed.tenant: -1, "other": 2}
    assert sorted(job.id for job in store.unfinished()) == ["job_0", "job_1", "job_4", "job_7", "job_8"]
    with pytest.raises(LedgerUnavailable):
        store.create_many([JobToCreate(a_job("job_9"), b"{}"), JobToCreate(a_job("job_0"), b"{}")])
    assert store.load("job_9") is None


def test_unfinished_async_jobs_are_read_page_by_page(database: LedgerDatabase) -> None:
    store = AsyncJobStore(database)
    names = [("b", "job_3"), ("a", "job_2"), ("b", "job_1"), ("a", "job_4")]
    for tenant, id in names:
        store.create(a_job(id, tenant=tenant), b"{}", None, None)
    store.create(a_job("job_5", tenant="a", status="completed"), b"{}", None, None)
    found, last = [], ("", "")
    while page := store.unfinished_page(last, 2):
        last = page[-1].tenant, page[-1].id
        found += [(job.tenant, job.id) for job in page]
    assert found == sorted(names)


def test_a_page_of_unfinished_async_jobs_reads_no_other_rows() -> None:
    with closing(LedgerDatabase("sqlite:///:memory:")) as database, database.reading() as connection:
        query = (
            "EXPLAIN QUERY PLAN SELECT detail FROM async_jobs WHERE status = 'in_progress' "
            "AND (tenant, id) > ('a', 'b') ORDER BY tenant, id LIMIT 500"
        )
        plan = [row[3] for row in connection.exec_driver_sql(query)]
    assert plan == ["SEARCH async_jobs USING INDEX async_jobs_by_status (status=? AND (tenant,id)>(?,?))"]


def test_async_jobs_and_items_of_batches_are_found_by_id_however_many_are_unfinished() -> None:
    """Without statistics SQLite takes any status for a rare one, and would search through all unfinished jobs."""
    with closing(LedgerDatabase("sqlite:///:memory:")) as database:
        jobs, items = AsyncJobStore(database), BatchStore(database)
        for id in ("job_1", "job_2"):
            jobs.create(a_job(id), b"{}", None, None)
        items.create(a_batch(status="in_progress"), [], None)
        executed: list[tuple[str, Any]] = []
        with database.reading() as connection:
            engine = connection.engine

        def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
            executed.append((statement, parameters))

        event.listen(engine, "before_cursor_execute", note)
        assert len(jobs.load_many(["job_1", "job_2"])) == len(jobs.open_ids(["job_1", "job_2", "job_3"])) == 2
        items.load_items([("b", 1), ("b", 2)])
        items.open_items([("b", 1), ("b", 2)])
        event.remove(engine, "before_cursor_execute", note)
        with database.reading() as connection:
            plans = {
                row[3]
                for statement, parameters in executed
                if statement.startswith("SELECT")
                for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            }
        assert {plan for plan in plans if "async_jobs" in plan} == {
            "SEARCH async_jobs USING INDEX sqlite_autoindex_async_jobs_1 (id=?)"
        }
        assert all("number=?" in plan for plan in plans if "batch_items" in plan)
        assert any("batch_items" in plan for plan in plans)


def test_an_async_job_ends_once_and_its_callback_is_delivered(database: LedgerDatabase) -> None:
    store = AsyncJobStore(database)
    job = a_job_with_callback()
    store.create(job, b"body", None, None)
    store.record([JobTry("job_1", 1)])
    loaded = store.load("job_1")
    assert loaded is not None
    assert (loaded[0].tries, loaded[1], loaded[2]) == (1, b"body", False)
    end = JobEnd(id="job_1", status="completed", at=5.0, expires_at=50.0, answer_status=200, answer=b"yes")
    assert store.end(end)
    assert not store.end(replace(end, answer=b"no"))
    assert (store.answer("job_1"), store.load("job_1")) == (b"yes", None)
    assert store.next_callback_at(4.0) == 5.0
    assert [one.id for one in store.due_callbacks(5.0, (), 2, 10)] == ["job_1"]
    assert store.due_callbacks(5.0, ("job_1",), 2, 10) == []
    delivery = Delivery(number=1, at=6.0, status=500, error=None, latency_ms=3)
    store.record_delivery("job_1", delivery, "pending", 7.0)
    store.record_delivery("job_1", replace(delivery, number=2, status=200), "delivered", 8.0)
    store.record_delivery("job_1", replace(delivery, number=3), "delivered", 9.0)
    assert [one.number for one in store.deliveries("job_1")] == [1, 2]
    assert store.sweep(50.0, 10) == 1
    assert store.deliveries("job_1") == []


def test_a_rotated_callback_secret_leaves_the_old_one_valid_for_the_grace(database: LedgerDatabase) -> None:
    store = CallbackSecretStore(database)
    old = store.rotate("acme", 1.0, 10.0)
    new = store.rotate("acme", 2.0, 10.0)
    assert [one.key for one in store.valid("acme", 11.9)] == [new.key, old.key]
    assert [one.key for one in store.valid("acme", 12.0)] == [new.key]
    assert store.valid("other", 2.0) == []
    assert len(store.all()) == 2
