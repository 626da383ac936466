"""One life of a gateway with background responses, on a real database."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from inferry.domain.clock import ManualClock
from inferry.domain.errors import LedgerUnavailable
from inferry.domain.storage import StorageLimits
from inferry.durable.background import BackgroundCall, BackgroundResponses
from inferry.durable.background_claims import BackgroundClaims
from inferry.durable.documents import Documents
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.durable.executor import StoreExecutor
from inferry.durable.responses import StoredResponse, StoredResponses
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.documents import DocumentStore


class FakeGateway:
    """Answers calls as the test says."""

    def __init__(self) -> None:
        self.calls: list[StoredCall] = []
        self.answers: list[CallAnswer] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.ledger_writes = self.failing_writes = 0

    async def write_ledger(self) -> None:
        self.ledger_writes += 1
        if self.ledger_writes <= self.failing_writes:
            raise LedgerUnavailable("away")

    def paths(self) -> frozenset[str]:
        return frozenset()

    async def call(self, call: StoredCall) -> CallAnswer:
        self.calls.append(call)
        await self.gate.wait()
        if self.answers:
            return self.answers.pop(0)
        response = bytes(a_response("completed").response)
        if call.on_piece is None:
            return CallAnswer(status=200, body=response)
        event = b'event: response.completed\ndata: {"type":"response.completed","response":%b}\n\n' % response
        call.on_piece(event)
        return CallAnswer(status=200, body=b": waiting\n\n" + event)


def a_response(status: str, **more: Any) -> StoredResponse:
    response = msgspec.json.encode({"id": "resp_1", "status": status, "background": True, "output": []})
    return StoredResponse(response=Raw(response), input=[Raw(b'{"id":"msg_1_i0"}')], **more)


def a_call(**more: Any) -> BackgroundCall:
    fields = {"key_id": None, "body": Raw(b"{}"), "headers": {}, "created_at": 0.0, "is_streamed": False, **more}
    return BackgroundCall(**fields)


class Process:
    """One life of the gateway, as far as this is concerned."""

    def __init__(self, documents: Documents, limits: StorageLimits, clock: ManualClock, name: str | None) -> None:
        self.gateway = FakeGateway()
        self.clock = clock
        self.documents = documents
        self.responses = StoredResponses(documents, limits)
        self.background = BackgroundResponses(
            self.responses,
            documents,
            self.gateway,
            clock.wall,
            write_ledger=self.gateway.write_ledger,
            claims=None if name is None else BackgroundClaims(documents, name),
        )

    async def status(self, id: str, tenant: str = "acme") -> str:
        return (await self.responses.get(tenant, id)).state.status

    async def until_ended(self, id: str = "resp_1", tenant: str = "acme") -> str:
        async with asyncio.timeout(120):
            while self.background.is_running(tenant, id) or await self.status(id, tenant) == "queued":
                await asyncio.sleep(0.001)
        return await self.status(id, tenant)


Start = Callable[..., Process]


@asynccontextmanager
async def a_database(path: Path, limits: StorageLimits | None = None) -> AsyncIterator[Start]:
    with closing(LedgerDatabase(f"sqlite:///{path / 'ledger.db'}")) as database:
        executor, clock = StoreExecutor(), ManualClock()
        documents = Documents(DocumentStore(database), executor, clock)
        yield lambda name=None: Process(documents, limits or StorageLimits(), clock, name)
        await executor.close()


def scenario(path: Path, work: Callable[[Start], Awaitable[None]], limits: StorageLimits | None = None) -> None:
    async def run() -> None:
        async with a_database(path, limits) as start:
            await work(start)

    asyncio.run(run())
