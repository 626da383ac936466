"""Requests about workers at a gateway that does not own them: the owner answers."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from inferry.domain.errors import NoWorker
from inferry.domain.values import replace
from inferry.domain.workers import WorkerView
from support.gateway_members import ClosingWorker, Member, members, ready
from support.scripted_worker import ScriptedWorker
from support.waiting import async_until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ADAPTER = {"lora_name": "sql", "lora_path": "/adapters/sql"}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


class Engine(ClosingWorker):
    """An engine of group `gpu` that loads adapters once it runs, and notes the runs that have ended."""

    def __init__(self) -> None:
        super().__init__("engine")
        self.adapters: dict[str, str] = {}
        self.is_started = self.is_stuck = False
        self.ended: list[tuple[str, str]] = []

    async def start(self) -> None:
        await super().start()
        self.is_started = True

    def view(self) -> WorkerView:
        view = super().view()
        return replace(view, group="gpu", models=view.models | set(self.adapters), adapters=frozenset(self.adapters))

    def may_load(self, path: str) -> bool:
        return True

    async def load_adapter(self, name: str, path: str) -> None:
        if not self.is_started:
            raise NoWorker("the engine is not running")
        if self.is_stuck:
            await asyncio.Event().wait()
        self.adapters[name] = path

    def unload_adapter(self, name: str) -> Coroutine[Any, Any, None]:
        del self.adapters[name]
        return asyncio.sleep(0)

    def end_run(self, tenant: str, run_id: str) -> None:
        self.ended.append((tenant, run_id))


def an_engine() -> ScriptedWorker:
    return Engine()


def engine_of(member: Member) -> Engine:
    engine = member.workers[-1]
    assert isinstance(engine, Engine)
    return engine


async def share(a: Member, b: Member) -> None:
    """`a` owns the workers, and `b` passes its calls on."""
    await a.roles.become_owner(1)
    await b.roles.become_ingress(a.address(1))
    await ready(a, b)


async def call(member: Member, run_id: str) -> None:
    status, _ = await member.post("/v1/chat/completions", CHAT, {"x-inferry-run-id": run_id})
    assert status == 200


async def told(member: Member, drained: tuple[str, ...], adapters: tuple[str, ...]) -> None:
    """Return once the owner has told the gateway of these."""
    link = member.roles._link
    assert link is not None

    def is_told() -> bool:
        found = link.catalog
        if found is None:
            return False
        return (found.drained, tuple(name for name, _, _ in found.adapters)) == (drained, adapters)

    await async_until(is_told)


async def advice(member: Member) -> Any:
    status, body = await member.get("/admin/scale")
    assert status == 200
    return [(one["group"], one["current"]) for one in body["groups"]]


async def workers(member: Member) -> dict[str, bool]:
    """The workers that the gateway lists, and whether each is drained."""
    status, body = await member.get("/admin/workers")
    assert status == 200
    return {one["name"]: one["drained"] for one in body["workers"]}


def test_every_gateway_gives_the_owners_scaling_advice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            for one in (a, b):
                one.service.gateway.scale.sample(one.service.gateway.now())
            assert await advice(a) == await advice(b) == [("gpu", 1)]
            _, page = await b.get("/metrics")
            assert "inferry_desired_workers{" not in page

    run(scenario())


def test_any_gateway_drains_and_readmits_a_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            assert (await b.post("/admin/workers/engine/drain"))[0] == 200
            assert await workers(a) == await workers(b) == {"engine": True}
            assert (await b.post("/admin/workers/engine/readmit"))[0] == 200
            assert await workers(a) == {"engine": False}
            assert (await b.post("/admin/workers/owner/drain"))[0] == 404

    run(scenario())


def test_any_gateway_loads_an_adapter_and_all_serve_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            status, body = await b.post("/v1/load_lora_adapter", ADAPTER)
            assert (status, body["workers"]) == (200, ["engine"])
            assert engine_of(a).adapters == {"sql": "/adapters/sql"}
            await async_until(lambda: b.service.pool.serves("sql"))
            assert (await b.post("/v1/unload_lora_adapter", {"lora_name": "sql"}))[0] == 200
            assert not engine_of(a).adapters

    run(scenario())


def test_other_requests_are_answered_by_the_gateway_that_is_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            assert (await b.get("/ready"))[0] == 200
            _, page = await b.get("/metrics")
            assert 'worker="owner"' in page
            assert (await b.get("/admin/tenants"))[0] == 200

    run(scenario())


def test_a_gateway_without_an_owner_says_so_instead_of_a_wrong_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            paths = "/admin/scale", "/admin/workers"
            answers = [await b.get(path) for path in paths]  # before its first role
            await share(a, b)
            await a.roles.close()
            answers += [await b.get(path) for path in paths]
            answers.append(await b.post("/v1/load_lora_adapter", ADAPTER))
            assert [(status, body["error"]["code"]) for status, body in answers] == [(503, "no_worker")] * 5
            await b.roles.become_owner(2)
            await ready(b)
            assert (await workers(b))["engine"] is False

    run(scenario())


def test_requests_about_workers_need_the_admin_key_where_they_are_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (_, b):
            for path in ("/admin/scale", "/admin/workers"):
                status, body = await b.get(path, {"x-forwarded-for": "10.0.0.1"})
                assert (status, body["error"]["code"]) == (403, "admin_only")

    run(scenario())


def test_a_request_that_waits_for_a_former_owner_ends_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            engine_of(a).is_stuck = True
            loading = asyncio.create_task(b.post("/v1/load_lora_adapter", ADAPTER))
            await async_until(lambda: a.service.gateway.adapters._loading)
            await b.roles.become_owner(2)
            status, body = await loading
            assert (status, body["error"]["code"]) == (503, "no_worker")

    run(scenario())


# -- the end of a run ------------------------------------------------------------------------------------------------


def test_the_owner_keeps_nothing_for_a_run_that_has_ended_at_another_gateway(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            await call(b, "r")
            status, _ = await b.post("/v1/runs/r/finish")
            assert status == 200
            await async_until(lambda: [run_id for _, run_id in engine_of(a).ended] == ["r"])
            status, body = await a.get("/v1/runs/r")
            assert (status, body["status"]) == (200, "finished")

    run(scenario())


def test_a_run_ends_at_the_owner_where_its_calls_came_through_another_gateway(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            await call(a, "r")
            b.service.gateway.release_run("default", "r")
            await async_until(lambda: ("default", "r") in engine_of(a).ended)

    run(scenario())


# -- takeover --------------------------------------------------------------------------------------------------------


def test_drains_and_adapters_survive_a_takeover(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            await b.post("/v1/load_lora_adapter", ADAPTER)
            await b.post("/admin/workers/engine/drain")
            await told(b, ("engine",), ("sql",))
            await a.roles.close()  # it is lost
            await b.roles.become_owner(2)
            await async_until(lambda: engine_of(b).adapters == {"sql": "/adapters/sql"})
            assert (await workers(b))["engine"]
            assert (await b.post("/v1/unload_lora_adapter", {"lora_name": "sql"}))[0] == 200

    run(scenario())


def test_a_takeover_does_not_lower_the_advice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            old, new = a.service.gateway, b.service.gateway
            old.scale.assume_needed("gpu", 4, old.now())
            old.scale.sample(old.now())
            link = b.roles._link
            assert link is not None
            await async_until(lambda: link.catalog is not None and link.catalog.desired == (("gpu", 4),))
            await b.roles.become_owner(2)
            new.scale.sample(new.now())
            assert new.scale.desired("gpu") == 4

    run(scenario())


def test_an_owner_hears_at_its_return_what_was_changed_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, an_engine) as (a, b):
            await share(a, b)
            await a.post("/admin/workers/engine/drain")
            await a.post("/v1/load_lora_adapter", ADAPTER)
            await told(b, ("engine",), ("sql",))
            await b.roles.become_owner(2)
            await a.roles.become_ingress(b.address(2))
            await async_until(lambda: bool(engine_of(b).adapters))
            await a.post("/admin/workers/engine/readmit")
            await a.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
            await told(a, (), ())
            await a.roles.become_owner(3)
            await b.roles.become_ingress(a.address(3))
            await ready(a, b)
            assert await workers(b) == {"engine": False}
            assert not engine_of(a).adapters

    run(scenario())
