"""How a gateway makes its storage, and where stored work runs."""

import asyncio
from contextlib import closing
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import msgspec
import pytest

from durable.async_work import a_job
from durable.background_process import a_call, a_response
from inferry.cli import election_wiring
from inferry.cli.config.callbacks import CallbacksConfig
from inferry.cli.election_wiring import GatewayRole
from inferry.cli.queue_wiring import SharedQueue
from inferry.cli.storage_wiring import Storage, make_storage
from inferry.domain.clock import SystemClock
from inferry.domain.ledger import RetentionPolicy
from inferry.domain.storage import StorageLimits, StoredFile
from inferry.durable import background
from inferry.durable.execute import CallAnswer, Execute, StoredCall
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.files import FileStore
from support.waiting import async_until


class FakeExecute:
    """Calls that never end."""

    def __init__(self) -> None:
        self.running: list[str] = []

    def paths(self) -> frozenset[str]:
        return frozenset()

    async def call(self, call: StoredCall) -> CallAnswer:
        self.running.append(call.job_id)
        try:
            await asyncio.Event().wait()
        finally:
            self.running.remove(call.job_id)
        raise AssertionError


def storage_of(ledger: str, *, is_shared: bool, execute: Execute | None = None) -> Storage:
    return make_storage(
        ledger,
        StorageLimits(),
        RetentionPolicy(),
        CallbacksConfig(),
        SystemClock(),
        execute or MagicMock(),
        MagicMock(),
        MagicMock(),
        max_line_bytes=1000,
        shared_queue=SharedQueue(AsyncMock(), "gateway", (), MagicMock()) if is_shared else None,
    )


@pytest.mark.parametrize(("is_shared", "left"), [(False, 0), (True, 1)])
def test_a_starting_gateway_keeps_uploads_of_other_gateways(tmp_path: Path, is_shared: bool, left: int) -> None:
    async def scenario() -> None:
        await storage_of(ledger, is_shared=is_shared).close()

    ledger = f"sqlite:///{tmp_path}/ledger.sqlite"
    with closing(LedgerDatabase(ledger)) as database:
        store = FileStore(database)
        file = StoredFile(
            id="f", tenant="acme", status="uploading", purpose="batch", filename="in.jsonl", size=0, created_at=1.0
        )
        store.begin(file)
        asyncio.run(scenario())
        assert store.discard_uploads() == left


def test_stored_work_runs_at_the_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        execute = FakeExecute()
        storage = storage_of(f"sqlite:///{tmp_path}/ledger.sqlite", is_shared=False, execute=execute)
        store, runner, now = storage.async_work.store, storage.async_work.runner, SystemClock().wall()
        jobs = [a_job(f"job_{number}", created_at=now, deadline=now + 3600.0) for number in range(3)]
        role = GatewayRole(MagicMock(storage=storage), None, None)
        store.create(jobs[0], b"{}", None, None)
        await role.become_owner(1, lambda: True)
        await async_until(lambda: execute.running == ["job_0-0"])
        store.create(jobs[1], b"{}", None, None)  # as another gateway does
        await async_until(lambda: execute.running == ["job_0-0", "job_1-0"])
        await role.become_ingress("", 2)
        assert not execute.running
        store.create(jobs[2], b"{}", None, None)
        runner.add(jobs[2])
        await role.become_owner(3, lambda: True)
        await async_until(lambda: sorted(execute.running) == ["job_0-0", "job_1-0", "job_2-0"])
        await role.close()
        await storage.close()

    monkeypatch.setattr(election_wiring, "STORED_WORK_POLL_S", 0.01)
    asyncio.run(scenario())


def test_a_background_response_outlasts_changes_of_the_role_and_one_that_was_left_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        execute = FakeExecute()
        storage = storage_of(f"sqlite:///{tmp_path}/ledger.sqlite", is_shared=True, execute=execute)
        role = GatewayRole(MagicMock(storage=storage), None, None)
        now = SystemClock().wall()
        await role.become_ingress("", 1)
        await storage.background.accept("acme", "resp_0", a_response("queued"), a_call(created_at=now))
        await async_until(lambda: execute.running == ["0-0"])
        await role.become_ingress("", 2)
        await role.become_owner(3, lambda: True)
        call = msgspec.json.encode(a_call(created_at=now))
        await storage.documents.put("acme", background.KIND, "resp_1", call, ttl_s=None)  # as another gateway did
        await storage.responses.put("acme", "resp_1", a_response("queued"))
        await async_until(lambda: execute.running == ["0-0", "1-0"])
        await role.become_ingress("", 4)
        assert execute.running == ["0-0", "1-0"]
        await role.close()
        await storage.close()
        assert not execute.running

    monkeypatch.setattr(election_wiring, "STORED_WORK_POLL_S", 0.01)
    asyncio.run(scenario())
