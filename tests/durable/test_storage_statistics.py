"""Open work and stored bytes, read from the database."""

from contextlib import closing

from durable.async_work import a_job, a_job_with_callback
from inferry.domain.async_jobs import JobEnd
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.storage_statistics import StorageStatisticsStore


def test_what_is_open_and_what_is_stored_is_counted(ledger_url: str) -> None:
    with closing(LedgerDatabase(ledger_url)) as database:
        statistics = StorageStatisticsStore(database)
        empty = statistics.read()
        assert (empty.open_async_jobs, empty.open_callbacks, empty.open_batches, empty.async_job_bytes) == (0, 0, 0, 0)
        assert empty.database_bytes > 0
        jobs = AsyncJobStore(database)
        for id in ("job_1", "job_2", "job_3"):
            jobs.create(a_job_with_callback(id, size=1000), b"x" * 1000, None, None)
        jobs.create(a_job("job_4", size=10), b"{}", None, None)
        jobs.end(JobEnd(id="job_1", status="completed", at=1.0, expires_at=None, answer=b"12345"))
        found = statistics.read()
        assert (found.open_async_jobs, found.open_callbacks) == (3, 1)
        assert found.async_job_bytes == 3015
        assert found.database_bytes >= empty.database_bytes
