"""Async jobs of concurrent requests: one transaction, an answer after the commit, each with its own refusal."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from durable.async_work import a_job, stores
from inferry.domain.async_jobs import AsyncJob, CreatedJobs, JobToCreate
from inferry.domain.errors import LedgerUnavailable, QueueFull, StorageQuotaExceeded
from inferry.domain.storage import StorageLimits
from inferry.durable.executor import StoreExecutor
from inferry.durable.job_acceptor import MAX_BYTES, MAX_JOBS, JobAcceptor

UNLIMITED = StorageLimits(max_bytes_per_tenant=None, max_jobs_per_tenant=None)


class RecordingStore:
    """Stores all, except what `check` raises for."""

    def __init__(self, check: Callable[[Sequence[JobToCreate]], None] = lambda _: None) -> None:
        self.check = check
        self.transactions: list[list[str]] = []

    def create_many(self, jobs: Sequence[JobToCreate]) -> CreatedJobs:
        self.check(jobs)
        self.transactions.append([one.job.id for one in jobs])
        return CreatedJobs([one.job for one in jobs], {}, {})


class Site:
    def __init__(self, store: RecordingStore) -> None:
        self.executor = StoreExecutor()
        self.run: list[str] = []
        self.acceptor = JobAcceptor(store, self.executor, UNLIMITED, lambda job: self.run.append(job.id))

    def create(self, id: str, body: bytes = b"{}") -> "asyncio.Task[AsyncJob]":
        return asyncio.get_running_loop().create_task(self.acceptor.create(a_job(id), body))


def test_jobs_of_concurrent_requests_are_one_transaction() -> None:
    async def scenario() -> None:
        store = RecordingStore()
        site = Site(store)
        names = [f"job_{number}" for number in range(MAX_JOBS + 50)]
        found = await asyncio.gather(*(site.create(name) for name in names))
        assert [job.id for job in found] == names == site.run
        assert [len(one) for one in store.transactions] == [MAX_JOBS, 50]
        await site.executor.close()

    asyncio.run(scenario())


def test_a_transaction_is_bounded_in_bytes() -> None:
    async def scenario() -> None:
        store = RecordingStore()
        site = Site(store)
        sizes = [MAX_BYTES // 2, MAX_BYTES // 2, 1, MAX_BYTES * 2, 1]
        await asyncio.gather(*(site.create(f"job_{number}", bytes(size)) for number, size in enumerate(sizes)))
        assert store.transactions == [["job_0", "job_1"], ["job_2"], ["job_3"], ["job_4"]]
        await site.executor.close()

    asyncio.run(scenario())


def test_a_request_is_answered_after_the_commit() -> None:
    async def scenario() -> None:
        begun, may_commit = threading.Event(), threading.Event()

        def wait(_: Sequence[JobToCreate]) -> None:
            begun.set()
            may_commit.wait()

        site = Site(RecordingStore(wait))
        first = site.create("job_1")
        await asyncio.to_thread(begun.wait)
        second = site.create("job_2")
        await asyncio.to_thread(lambda: None)
        assert not first.done()
        assert not second.done()
        assert site.run == []
        may_commit.set()
        await asyncio.gather(first, second)
        assert site.run == ["job_1", "job_2"]
        await site.executor.close()

    asyncio.run(scenario())


def test_a_job_whose_request_has_gone_runs() -> None:
    async def scenario() -> None:
        may_commit = threading.Event()

        def wait(_: Sequence[JobToCreate]) -> None:
            may_commit.wait()

        site = Site(RecordingStore(wait))
        gone, stays = site.create("job_1"), site.create("job_2")
        await asyncio.sleep(0)
        gone.cancel()
        may_commit.set()
        await stays
        assert site.run == ["job_1", "job_2"]
        await site.executor.close()

    asyncio.run(scenario())


def test_a_job_that_cannot_be_stored_refuses_no_other() -> None:
    async def scenario() -> None:
        def check(jobs: Sequence[JobToCreate]) -> None:
            if any(one.job.id == "job_bad" for one in jobs):
                raise ValueError("a character that cannot be stored")

        site = Site(RecordingStore(check))
        names = ["job_1", "job_bad", "job_2"]
        found = await asyncio.gather(*(site.create(name) for name in names), return_exceptions=True)
        assert [one.id if isinstance(one, AsyncJob) else type(one) for one in found] == ["job_1", ValueError, "job_2"]
        assert site.run == ["job_1", "job_2"]
        await site.executor.close()

    asyncio.run(scenario())


def test_a_database_that_is_away_is_asked_once_and_refuses_all() -> None:
    async def scenario() -> None:
        calls = 0

        def away(_: Sequence[JobToCreate]) -> None:
            nonlocal calls
            calls += 1
            raise LedgerUnavailable("away", retry_after_s=2.0)

        site = Site(RecordingStore(away))
        found = await asyncio.gather(*(site.create(f"job_{n}") for n in range(9)), return_exceptions=True)
        assert {type(one) for one in found} == {LedgerUnavailable}
        assert calls == 1
        with pytest.raises(LedgerUnavailable):
            await site.create("job_10")
        await site.executor.close()

    asyncio.run(scenario())


def test_limits_are_exact_and_added_up_rarely() -> None:
    async def scenario() -> None:
        async with stores() as found:
            checks, create_many = 0, found.jobs.create_many

            def counted(jobs: Sequence[JobToCreate]) -> CreatedJobs:
                nonlocal checks
                checks += any(one.max_unfinished is not None for one in jobs)
                return create_many(jobs)

            found.jobs.create_many = counted  # type: ignore[method-assign]
            limits = StorageLimits(max_bytes_per_tenant=2 * 1500, max_jobs_per_tenant=1000)
            acceptor = JobAcceptor(found.jobs, found.executor, limits, lambda _: None)
            refused = 0
            for number in range(1010):
                try:
                    await acceptor.create(a_job(f"job_{number}"), b"{}")
                except QueueFull:
                    refused += 1
            assert refused == 10
            assert len(found.jobs.unfinished()) == 1000
            assert checks < 150
            bounded = StorageLimits(max_bytes_per_tenant=2 * 1001, max_jobs_per_tenant=None)
            acceptor = JobAcceptor(found.jobs, found.executor, bounded, lambda _: None)
            await acceptor.create(a_job("job_last"), b"{}")
            with pytest.raises(StorageQuotaExceeded):
                await acceptor.create(a_job("job_none"), b"{}")

    asyncio.run(scenario())
