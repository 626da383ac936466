"""Builders for tests of async jobs: a database in memory, jobs, a scripted gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from msgspec.structs import replace

from inferry.domain.async_jobs import AsyncJob, AsyncJobDetail
from inferry.durable.async_job_runner import AsyncJobRunner
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.durable.executor import StoreExecutor
from inferry.durable.result_recorder import ResultRecorder
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.callback_secrets import CallbackSecretStore
from inferry.ledger.stores.database import LedgerDatabase
from support.virtual_time import LoopClock
from support.waiting import async_until

URL = "https://hooks.example/in"
OK = CallAnswer(status=200, body=b'{"ok":true}', request_id="req")


class Stores(NamedTuple):
    jobs: AsyncJobStore
    secrets: CallbackSecretStore
    executor: StoreExecutor


def a_job(id: str = "job_1", **changes: Any) -> AsyncJob:
    job = AsyncJob(
        id=id,
        tenant="t",
        key_id=None,
        endpoint="/v1/chat/completions",
        lane="P2",
        status="in_progress",
        created_at=1000.0,
        deadline=1000.0 + 86_400.0,
        detail=AsyncJobDetail(run_id=id, step_id=id),
        size=2,
    )
    return replace(job, **changes)


def a_job_with_callback(id: str = "job_1", **changes: Any) -> AsyncJob:
    detail = AsyncJobDetail(run_id=id, step_id=id, callback_url=URL)
    return a_job(id, detail=detail, callback="waiting", **changes)


@asynccontextmanager
async def stores(url: str = "sqlite:///:memory:") -> AsyncIterator[Stores]:
    database = LedgerDatabase(url)
    executor = StoreExecutor()
    try:
        yield Stores(AsyncJobStore(database), CallbackSecretStore(database), executor)
    finally:
        await executor.close()
        database.close()


class ScriptedExecute:
    """Answers calls: `script` gives the answer to one, or waits for it."""

    def __init__(self, script: Callable[[StoredCall], CallAnswer | asyncio.Future[CallAnswer]] = lambda _: OK) -> None:
        self.script = script
        self.calls: list[StoredCall] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled: list[str] = []

    def paths(self) -> frozenset[str]:
        return frozenset({"/v1/chat/completions"})

    async def call(self, call: StoredCall) -> CallAnswer:
        self.calls.append(call)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0.01)
            found = self.script(call)
            return found if isinstance(found, CallAnswer) else await found
        except asyncio.CancelledError:
            self.cancelled.append(call.job_id)
            raise
        finally:
            self.in_flight -= 1

    @property
    def job_ids(self) -> list[str]:
        return [call.job_id for call in self.calls]


def a_runner(
    found: Stores,
    execute: ScriptedExecute,
    *,
    concurrency: int = 64,
    write_ledger: Callable[[], object] = lambda: None,
    on_end: Callable[[], None] = lambda: None,
) -> AsyncJobRunner:
    return AsyncJobRunner(
        found.jobs,
        found.executor,
        execute,
        ResultRecorder(found.jobs, found.executor, write_ledger),
        LoopClock(),
        concurrency=concurrency,
        ttl_s=500.0,
        on_end=on_end,
    )


async def until(condition: Callable[[], bool], limit_s: float = 20_000.0) -> None:
    await async_until(condition, limit_s, every_s=5.0)
