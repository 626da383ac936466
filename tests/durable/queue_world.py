"""Consumers of the work queue in virtual time, with a database in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from durable.async_work import OK, ScriptedExecute, a_job
from inferry.durable.dead_letters import DeadLetters
from inferry.durable.documents import Documents
from inferry.durable.execute import StoredCall
from inferry.durable.executor import StoreExecutor
from inferry.durable.queued_jobs import QueuedJobs
from inferry.durable.work_runner import WorkRunner
from inferry.durable.work_source import DatabaseWork
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.batches import BatchStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.documents import DocumentStore
from support.memory_work_queue import MemoryWorkQueue
from support.virtual_time import LoopClock


class Consumer:
    """A process with a runner. `kill` ends it without a word."""

    def __init__(self, world: "World", name: str, execute: ScriptedExecute, **options: Any) -> None:
        self.execute = execute
        self.source = DatabaseWork(
            world.jobs,
            world.batches,
            world.executor,
            LoopClock(),
            world.dead_letters,
            write_ledger=lambda: None,
            ttl_s=None,
            on_end=lambda: None,
        )
        options = {"give_up": self.source.give_up, **options}
        self.runner = WorkRunner(
            world.queue, self.source, execute, LoopClock(), consumer=name, lanes={"P0": 4, "P2": 4}, **options
        )
        self.runner.start()

    async def kill(self) -> None:
        runner = self.runner
        tasks = [*runner._loops, *(held.task for held in runner._held.values() if held.task is not None)]
        runner._held.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class World:
    def __init__(self, database: LedgerDatabase) -> None:
        self.executor = StoreExecutor()
        self.jobs, self.batches = AsyncJobStore(database), BatchStore(database)
        documents = Documents(DocumentStore(database), self.executor, LoopClock())
        self.dead_letters = DeadLetters(documents)
        self.queue = MemoryWorkQueue()
        self.consumers: list[Consumer] = []
        self.swept = QueuedJobs(
            self.jobs,
            self.executor,
            self.queue,
            *self._swept_by(),
            LoopClock(),
            on_end=lambda: None,
        )
        self.swept.start()

    def _swept_by(self) -> tuple[DatabaseWork, WorkRunner]:
        owner = Consumer(self, "owner", ScriptedExecute())
        self.consumers.append(owner)
        return owner.source, owner.runner

    def consumer(self, name: str, script: Callable[[StoredCall], Any] = lambda _: OK, **options: Any) -> Consumer:
        one = Consumer(self, name, ScriptedExecute(script), **options)
        self.consumers.append(one)
        return one

    def accept(self, id: str, tenant: str = "t", body: bytes = b"{}", **changes: Any) -> None:
        job = a_job(id, tenant=tenant, created_at=LoopClock().wall(), deadline=LoopClock().wall() + 86_400.0, **changes)
        self.jobs.create(job, body, None, None)
        self.swept.add(job)

    def status(self, id: str, tenant: str = "t") -> str:
        found = self.jobs.get(tenant, id, LoopClock().wall())
        assert found is not None
        return found.status


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    database = LedgerDatabase("sqlite:///:memory:")
    world = World(database)
    try:
        yield world
    finally:
        await world.swept.close()
        for one in world.consumers:
            await one.runner.close()
        await world.executor.close()
        database.close()
