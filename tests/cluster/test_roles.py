"""A gateway that becomes owner or ingress of its domain while calls run."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from inferry.dispatch.pool import Pool
from inferry.domain.clock import SystemClock
from inferry.domain.streams import Done
from inferry.workers.remote.owner_link import OwnerLink
from inferry.workers.remote.worker import RemoteWorker
from support.gateway_members import WORDS, Member, members, ready
from support.waiting import async_until


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


class SlowPool:
    """A pool that workers leave when the test says so."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.leaving, self.may_leave = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def remove(self, name: str, grace_s: float) -> None:
        self.leaving.set()
        await self.may_leave.wait()
        await self._pool.remove(name, grace_s)


def test_calls_of_an_ingress_run_on_the_owners_workers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            assert (a.roles.is_owner, b.roles.is_owner) == (True, False)
            text, end = await b.begin(0)
            assert (text, isinstance(end, Done)) == ("".join(WORDS), True)
            assert not b.workers
            assert len(a.workers[0].plans) == 1

    run(scenario())


def test_streams_survive_a_change_of_owner_without_a_lost_or_repeated_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            a.workers[0].pause_s = 0.002
            calls = [one.begin(number) for number in range(8) for one in (a, b)]
            await async_until(lambda: a.workers[0].running == 16)
            await b.roles.become_owner(2)
            await a.roles.become_ingress(b.address(2))
            for text, end in await asyncio.gather(*calls):
                assert isinstance(end, Done), end
                assert text == "".join(WORDS)
            assert a.workers[0].running == 0
            await async_until(lambda: "owner" not in b.service.pool.names())
            assert a.service.pool.names() == ["owner"]

    run(scenario())


def test_an_ingress_follows_to_the_next_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            c = Member(tmp_path, "c")
            await c.start()
            await a.roles.become_owner(1)
            for one in (b, c):
                await one.roles.become_ingress(a.address(1))
            await ready(a, b, c)
            a.workers[0].pause_s = 0.002
            calls = [c.begin(number) for number in range(6)]
            await async_until(lambda: a.workers[0].running == 6)
            await a.roles.close()  # it is lost
            await b.roles.become_owner(2)
            await c.roles.become_ingress(b.address(2))
            for text, end in await asyncio.gather(*calls):
                assert (text, isinstance(end, Done)) == ("".join(WORDS), True)
            await c.close()

    run(scenario())


def test_a_call_that_arrives_between_two_owners_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            await a.roles.close()
            await async_until(lambda: not b.service.gateway.is_ready)
            call = b.begin(0)
            await asyncio.sleep(0)
            await b.roles.become_owner(2)
            text, end = await call
            assert (text, isinstance(end, Done)) == ("".join(WORDS), True)

    run(scenario())


def test_nothing_is_sent_without_a_valid_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, _):
            owns = [True]
            await a.roles.become_owner(1, lambda: owns[0])
            await ready(a)
            owns[0] = False
            call = a.begin(0)
            await async_until(lambda: not a.service.gateway.is_ready or a.service.gateway.in_flight)
            assert not a.workers[0].plans
            owns[0] = True
            text, end = await call
            assert (text, isinstance(end, Done)) == ("".join(WORDS), True)
            assert len(a.workers[0].plans) == 1

    run(scenario())


def test_an_owner_that_owns_the_workers_again_sends_in_the_new_epoch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            epoch = [1]
            await a.roles.become_owner(1, lambda: epoch[0] == 1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            epoch[0] = 2
            await a.roles.become_owner(2, lambda: epoch[0] == 2)
            await b.roles.become_ingress(a.address(2))
            for one in (a, b):
                text, end = await one.begin(0)
                assert (text, isinstance(end, Done)) == ("".join(WORDS), True)
            assert len(a.workers) == 1

    run(scenario())


def test_a_gateway_that_cannot_listen_keeps_no_workers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await a.roles.become_owner(1)
            assert a.roles.port is not None
            b.roles._listen = "127.0.0.1", a.roles.port
            with pytest.raises(OSError, match="in use"):
                await b.roles.become_owner(2)
            assert (b.roles.is_owner, b.service.pool.names()) == (False, [])
            b.roles._listen = "127.0.0.1", 0
            await b.roles.become_owner(3)
            await ready(b)

    run(scenario())


def test_tenants_are_followed_once_after_any_number_of_changes_of_role(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await b.roles.become_owner(1)
            await a.roles.become_owner(2)
            changed = a.service.tenants.on_change
            assert changed is not None
            await a.roles.become_ingress(b.address(1))
            await a.roles.become_owner(3)
            assert a.service.tenants.on_change is changed
            told = asyncio.Event()
            link = OwnerLink(a.address(3), SystemClock())
            link.on_tenants_changed = told.set
            link.start()
            await link.wait_connected()
            changed()
            await told.wait()
            await link.close()

    run(scenario())


def test_a_change_of_role_waits_for_the_workers_of_the_last_owner_to_leave(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            remote = b.service.pool.worker("owner")
            assert isinstance(remote, RemoteWorker)
            pool = SlowPool(b.service.pool)
            b.roles._remote._pool = pool  # type: ignore[assignment]
            await b.roles.become_owner(2)
            await pool.leaving.wait()
            change = asyncio.create_task(b.roles.become_ingress(a.address(1)))
            await async_until(lambda: b.roles._settling is None)
            pool.may_leave.set()
            await change
            assert b.service.pool.names() == ["owner"]
            assert b.service.pool.worker("owner") is not remote

    run(scenario())
