"""A worker that is used while this process owns it."""

import asyncio

from inferry.domain.clock import SystemClock
from inferry.domain.errors import WorkerUnreachable
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import AdapterHost
from inferry.domain.streams import Failed, Item
from inferry.workers.leased import lease
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.builders import a_job
from support.scripted_worker import ScriptedWorker
from support.upstream import Upstream


class AdapterWorker(ScriptedWorker):
    def __init__(self) -> None:
        super().__init__("engine")
        self.adapters: dict[str, str] = {}

    def may_load(self, path: str) -> bool:
        return path.startswith("/adapters/")

    async def load_adapter(self, name: str, path: str) -> None:
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]


def test_a_leased_worker_loads_adapters_if_its_worker_does() -> None:
    async def scenario() -> None:
        worker = AdapterWorker()
        leased = lease(worker, lambda: True)
        assert isinstance(leased, AdapterHost)
        assert (leased.may_load("/adapters/a"), leased.may_load("/etc")) == (True, False)
        await leased.load_adapter("a", "/adapters/a")
        assert worker.adapters == {"a": "/adapters/a"}
        await leased.unload_adapter("a")
        assert worker.adapters == {}
        assert not isinstance(lease(ScriptedWorker("engine"), lambda: True), AdapterHost)

    asyncio.run(scenario())


def test_a_lease_that_ends_while_a_call_connects_is_noticed_before_its_first_byte() -> None:
    async def scenario() -> None:
        async with Upstream() as upstream, asyncio.timeout(60):
            settings = HttpWorkerSettings(url=upstream.url, profile=PROFILES["openai"], models=("m",))
            worker = OpenAIHttpWorker("engine", settings, SystemClock())
            answers = [True, False]  # when the plan is sent, and once the connection is open
            job, items = a_job(), list[Item]()
            plan = BatchPlan(plan_id=1, worker="engine", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
            await lease(worker, lambda: answers.pop(0)).run(plan, items.append)
            await worker.close()
            (end,) = items
            assert isinstance(end, Failed)
            assert isinstance(end.error, WorkerUnreachable)
            assert (answers, upstream.bodies) == ([], [])

    asyncio.run(scenario())
