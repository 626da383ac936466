"""A worker that is used while this process owns it."""

import asyncio

from inferry.domain.ports import AdapterHost
from inferry.workers.leased import lease
from support.scripted_worker import ScriptedWorker


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
