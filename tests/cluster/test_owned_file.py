"""Workers of a `workers_file` that gateways share: the owner alone builds them, and the others pass jobs on to it."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from inferry.dispatch import workers_file
from support.gateway_members import WORDS, Member, members, ready
from support.loop_helpers import run_pending
from support.waiting import async_until


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(workers_file, "POLL_INTERVAL_S", 0.01)
    path = tmp_path / "workers"
    path.write_text("x")
    return path


def write(file: Path, content: str) -> None:
    file.write_text(content)


def names(member: Member) -> list[str]:
    return sorted(worker.name for worker in member.workers)


async def text_of(member: Member, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": len(WORDS)}
    status, answer = await member.post("/v1/chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_workers_of_the_file_serve_calls_of_every_gateway_and_only_the_owner_has_them(
    tmp_path: Path, file: Path
) -> None:
    async def scenario() -> None:
        async with members(tmp_path, file=file) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            await async_until(lambda: b.service.pool.serves("of-x"))
            assert await text_of(b, "of-x") == "".join(WORDS)
            write(file, "x y")
            await async_until(lambda: b.service.pool.serves("of-y"))
            assert await text_of(b, "of-y") == "".join(WORDS)
            write(file, "y")
            await async_until(lambda: not b.service.pool.serves("of-x"))
            assert (names(a), names(b)) == (["engine", "x", "y"], [])

    run(scenario())


def test_the_next_owner_has_the_workers_of_the_file_and_the_last_one_has_none(tmp_path: Path, file: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, file=file) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            await async_until(lambda: b.service.pool.serves("of-x"))
            await b.roles.become_owner(2)
            await a.roles.become_ingress(b.address(2))
            write(file, "x z")
            await async_until(lambda: a.service.pool.serves("of-z"))
            assert [await text_of(one, model) for one in (a, b) for model in ("of-x", "of-z")] == ["".join(WORDS)] * 4
            assert (names(a), names(b)) == (["engine", "x"], ["engine", "x", "z"])
            assert a.service.pool.names() == ["owner"]

    run(scenario())


def test_a_worker_that_is_being_removed_when_the_owner_changes_goes_and_may_come_back(
    tmp_path: Path, file: Path
) -> None:
    async def scenario() -> None:
        async with members(tmp_path, file=file) as (a, b):
            await a.roles.become_owner(1)
            await ready(a)
            await async_until(lambda: a.service.pool.serves("of-x"))
            a.gate.clear()
            call = asyncio.create_task(text_of(a, "of-x"))
            await async_until(lambda: a.workers[1].running == 1)
            write(file, "y")
            await async_until(lambda: a.service.pool.serves("of-y"))  # x drains, and would for 100 s
            write(file, "x y")
            await b.roles.become_owner(2)
            await a.roles.become_ingress(b.address(2))
            assert await call == "".join(WORDS)
            await async_until(lambda: a.service.pool.names() == ["owner"])
            a.gate.set()
            await a.roles.become_owner(3)
            await b.roles.become_ingress(a.address(3))
            await async_until(lambda: a.service.pool.names() == ["engine", "x", "y"])

    run(scenario())


def test_nothing_is_sent_to_workers_of_the_file_without_a_valid_lease(tmp_path: Path, file: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path, file=file) as (a, _):
            owns = [True]
            await a.roles.become_owner(1, lambda: owns[0])
            await async_until(lambda: a.service.pool.serves("of-x"))
            owns[0] = False
            call = asyncio.create_task(text_of(a, "of-x"))
            await async_until(lambda: a.service.gateway.in_flight or a.workers[1].plans)
            await run_pending(100)
            assert a.workers[1].plans == []
            await a.roles.become_owner(2)
            assert await call == "".join(WORDS)

    run(scenario())
