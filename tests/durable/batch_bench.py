"""A batch runner with a database and an engine that answers as a test says, in virtual time."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferry.domain.callers import ANONYMOUS
from inferry.domain.storage import Batch, BatchDetail, BatchItem, StorageLimits
from inferry.durable.batch_runner import BatchRunner
from inferry.durable.batches import Batches, NewBatch
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.durable.executor import StoreExecutor
from inferry.durable.files import Files
from inferry.durable.provider_run import Providers
from inferry.ledger.stores.batches import BatchStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.files import FileStore
from inferry.ledger.stores.provider_batches import ProviderBatchStore
from support.virtual_time import LoopClock

OK = CallAnswer(status=200, body=b'{"ok":\n true}', request_id="q")


class Engine:
    """Answers after `delay_s`, or as `answer` says; keeps what was called, and how much at once."""

    def __init__(self, delay_s: float = 1.0) -> None:
        self.delay_s = delay_s
        self.calls: list[StoredCall] = []
        self.in_flight: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.answer: Callable[[StoredCall], CallAnswer] = lambda call: OK
        self.ended = 0

    def paths(self) -> frozenset[str]:
        return frozenset({"/v1/x"})

    async def call(self, call: StoredCall) -> CallAnswer:
        self.calls.append(call)
        self.in_flight[call.tenant] += 1
        self.most[call.tenant] = max(self.most[call.tenant], self.in_flight[call.tenant])
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.in_flight[call.tenant] -= 1
        self.ended += 1
        return self.answer(call)


def no_providers(database: LedgerDatabase, executor: StoreExecutor, clock: LoopClock) -> Providers:
    return Providers(
        [],
        ProviderBatchStore(database),
        executor,
        clock,
        caller_of=lambda tenant, key: ANONYMOUS,
        cost_of=lambda *_: None,
        charge=lambda _: None,
        is_run_cancelled=lambda *_: False,
    )


class Bench:
    """Everything of one process around a database that outlives it."""

    def __init__(self, path: Path, engine: Engine, **limits: Any) -> None:
        self.engine = engine
        self.database = LedgerDatabase(f"sqlite:///{path}")
        self.executor = StoreExecutor()
        self.clock = LoopClock()
        self.store = BatchStore(self.database)
        self.file_store = FileStore(self.database)
        self.files = Files(self.file_store, self.executor, StorageLimits(**limits), self.clock)
        self.ledger_writes = 0
        self.runner = BatchRunner(
            self.store,
            self.files,
            self.executor,
            engine,
            self.clock,
            max_line_bytes=1000,
            write_ledger=self._write_ledger,
            providers=no_providers(self.database, self.executor, self.clock),
        )
        self.batches = Batches(self.store, self.files, self.executor, self.runner, engine, self.clock)

    def _write_ledger(self) -> None:
        self.ledger_writes += 1

    async def __aenter__(self) -> "Bench":
        self.runner.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.close()
        await self.executor.close()
        self.database.close()

    async def create(self, count: int, tenant: str = "acme", window_s: float = 86_400.0) -> Batch:
        items = [BatchItem(number, f"r{number}", b'{"n":%d}' % number) for number in range(1, count + 1)]
        return await self.batches.create(
            NewBatch(
                tenant=tenant,
                key_id="k",
                api="anthropic",
                endpoint="/v1/x",
                window_s=window_s,
                detail=BatchDetail(output_ttl_s=1000.0),
                items=items,
            )
        )

    async def create_from_file(self, content: bytes, tenant: str = "acme") -> Batch:
        upload = await self.files.begin_upload(tenant)
        await upload.write(content)
        file = await upload.finish(purpose="batch", filename="in", ttl_s=None)
        return await self.batches.create(
            NewBatch(
                tenant=tenant,
                key_id=None,
                api="openai",
                endpoint="/v1/x",
                window_s=86_400.0,
                detail=BatchDetail(),
                input_file=file.id,
            )
        )

    async def ended(self, batch: Batch) -> Batch:
        while (found := await self.batches.get(batch.tenant, batch.api, batch.id)).status not in (
            *("completed", "failed", "expired", "cancelled"),
        ):
            await asyncio.sleep(0.5)
        return found

    async def lines(self, batch: Batch) -> list[dict[str, Any]]:
        content = b"".join([page async for page in self.batches.result_lines(batch)])
        return [json.loads(line) for line in content.splitlines()]
