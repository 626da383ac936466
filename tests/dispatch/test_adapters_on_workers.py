"""Adapters on several workers: all or none, one name, and calls that wait for one that is unloaded."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from inferry.dispatch.fleet_adapters import FleetAdapters
from inferry.domain.errors import Conflict, InvalidRequest, NotFound
from inferry.domain.ports import ModelCard
from inferry.domain.workers import Capacity, Phase, WorkerView
from support.loop_helpers import run_pending

pytestmark = pytest.mark.plain


class Host:
    """A worker of one base model with a list of adapters; `problem` is raised instead of loading."""

    def __init__(self, name: str, base: str = "m", problem: Exception | None = None) -> None:
        self.name, self._base, self.problem = name, base, problem
        self.adapters: list[str] = []
        self.freed = asyncio.Event()
        self.freed.set()

    def view(self) -> WorkerView:
        return WorkerView(
            worker=self.name,
            models=frozenset([self._base, *self.adapters]),
            adapters=frozenset(self.adapters),
            phase=Phase.READY,
            capacity=Capacity(8),
            observed_at=0.0,
        )

    def cards(self) -> list[ModelCard]:
        return [ModelCard(name=self._base)]

    def may_load(self, path: str) -> bool:
        return path.startswith("/allowed")

    async def load_adapter(self, name: str, path: str) -> None:
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        self.adapters.append(name)

    def unload_adapter(self, name: str) -> Coroutine[Any, Any, None]:
        self.adapters.remove(name)

        async def free() -> None:
            await self.freed.wait()

        return free()

    async def start(self) -> None: ...

    async def run(self, plan: Any, emit: Any) -> None: ...

    async def cancel(self, job_ids: Any) -> frozenset[str]:
        return frozenset()

    async def close(self) -> None: ...


class Around:
    """What the control uses of pool, loop and catalogue, with a record of it."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.happened: list[str] = []
        self.running: list[str] = []

    def control(self) -> FleetAdapters:
        note = self.happened.append
        pool = SimpleNamespace(
            views=lambda: [host.view() for host in self.hosts.values()],
            worker=self.hosts.get,
            refresh_view=lambda name: note(f"refresh {name}"),
        )
        loop = SimpleNamespace(
            streams=lambda: [
                SimpleNamespace(attempt=SimpleNamespace(job=SimpleNamespace(route=SimpleNamespace(model=model))))
                for model in self.running
            ],
            end_unroutable=lambda reason: note("end queued"),
        )
        models = SimpleNamespace(
            share_tokenizer=lambda adapter, model: note(f"tokenizer of {model}"),
            forget_tokenizer=lambda adapter: note("forget tokenizer"),
        )
        return FleetAdapters(pool, loop, models)  # type: ignore[arg-type]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_all_workers_that_may_load_the_path_load_it() -> None:
    async def scenario() -> None:
        around = Around(Host("a"), Host("b"))
        assert await around.control().load("sql", "/allowed/x", None) == ["a", "b"]
        assert [host.adapters for host in around.hosts.values()] == [["sql"], ["sql"]]
        assert around.happened == ["tokenizer of m", "refresh a", "refresh b"]
        with pytest.raises(Conflict):
            await around.control().load("sql", "/allowed/y", None)
        with pytest.raises(Conflict):
            await around.control().load("m", "/allowed/y", None)
        with pytest.raises(InvalidRequest, match="adapter_dirs"):
            await around.control().load("other", "/elsewhere", None)

    run(scenario)


def test_an_adapter_that_one_worker_refuses_is_served_by_none() -> None:
    async def scenario() -> None:
        around = Around(Host("a"), Host("b", problem=InvalidRequest("use_dora")))
        with pytest.raises(InvalidRequest, match="use_dora"):
            await around.control().load("sql", "/allowed/x", None)
        assert around.hosts["a"].adapters == []
        assert around.happened == ["tokenizer of m", "refresh a", "forget tokenizer", "end queued"]

    run(scenario)


def test_a_name_that_is_being_loaded_is_taken() -> None:
    async def scenario() -> None:
        around = Around(Host("a"))
        control = around.control()
        both = (control.load("sql", "/allowed/x", None), control.load("sql", "/allowed/y", None))
        first, second = await asyncio.gather(*both, return_exceptions=True)
        assert first == ["a"]
        assert isinstance(second, Conflict)
        assert around.hosts["a"].adapters == ["sql"]
        assert around.happened == ["tokenizer of m", "refresh a"]

    run(scenario)


def test_workers_of_different_models_need_the_name_of_one() -> None:
    async def scenario() -> None:
        around = Around(Host("a"), Host("b", base="n"))
        with pytest.raises(InvalidRequest, match="`base_model_name` must name one of m, n"):
            await around.control().load("sql", "/allowed/x", None)
        assert await around.control().load("sql", "/allowed/x", "n") == ["b"]

    run(scenario)


def test_a_name_is_free_when_all_its_calls_have_ended() -> None:
    async def scenario() -> None:
        around = Around(Host("a"))
        around.running = ["m", "sql"]  # one rests before a retry
        with pytest.raises(Conflict, match="have not ended"):
            await around.control().load("sql", "/allowed/x", None)
        around.running = ["m"]
        assert await around.control().load("sql", "/allowed/x", None) == ["a"]

    run(scenario)


def test_queued_calls_end_before_the_last_running_one() -> None:
    async def scenario() -> None:
        host = Host("a")
        around = Around(host)
        control = around.control()
        await control.load("sql", "/allowed/x", None)
        host.freed.clear()
        around.happened.clear()
        unloading = asyncio.create_task(control.unload("sql"))
        await run_pending()
        assert around.happened == ["refresh a", "forget tokenizer", "end queued"]
        assert not unloading.done()
        host.freed.set()
        assert await unloading == ["a"]
        with pytest.raises(NotFound):
            await control.unload("sql")

    run(scenario)
