"""What every work queue does: Redis, and the one in memory that tests in virtual time use."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from inferry.cluster.redis_work_queue import RedisWorkQueue
from inferry.domain.work_queue import MAX_DELIVERIES, NewWork, QueueEntry, QueueUnavailable, Wanted, WorkQueue
from support.memory_work_queue import MemoryWorkQueue
from support.redis_server import RedisServer

ALL = Wanted(lanes=[("P2", 100)])
Play = Callable[[Callable[[WorkQueue], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["memory", "redis"])
def play(request: pytest.FixtureRequest) -> Play:
    def run(scenario: Callable[[WorkQueue], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            if request.param == "memory":
                await scenario(MemoryWorkQueue())
                return
            server: RedisServer = request.getfixturevalue("redis_server")
            queue = RedisWorkQueue(server.url)
            try:
                await scenario(queue)
            finally:
                await queue.close()

        asyncio.run(main())

    return run


def work(id: str, tenant: str = "t", model: str = "m", lane: str = "P2") -> NewWork:
    return NewWork(id, lane, model, tenant)


def ids(entries: list[QueueEntry]) -> list[str]:
    return [entry.id for entry in entries]


def test_an_id_is_queued_once_until_its_work_has_ended(play: Play) -> None:
    async def scenario(queue: WorkQueue) -> None:
        assert await queue.add([work("a"), work("b")]) == 2
        assert await queue.add([work("a"), work("c")]) == 1
        taken = await queue.take("one", ALL)
        assert ids(taken) == ["a", "b", "c"]
        assert await queue.take("two", ALL) == []
        assert await queue.add([work("a")]) == 0  # it is held
        await queue.done(taken)
        assert (await queue.renew("one", [])).depth == 0
        assert await queue.add([work("a")]) == 1

    play(scenario)


def test_many_requests_at_once_are_all_answered(play: Play) -> None:
    async def scenario(queue: WorkQueue) -> None:
        assert sum(await asyncio.gather(*(queue.add([work(f"{number}")]) for number in range(200)))) == 200
        assert queue.failures == 0

    play(scenario)


def test_tenants_of_a_lane_take_turns(play: Play) -> None:
    async def scenario(queue: WorkQueue) -> None:
        await queue.add([work(f"big-{number}", "big") for number in range(50)])
        await queue.add([work("small-0", "small"), work("small-1", "small")])
        taken = ids(await queue.take("one", Wanted(lanes=[("P2", 4)])))
        assert sorted(taken) == ["big-0", "big-1", "small-0", "small-1"]

    play(scenario)


def test_a_consumer_takes_its_models_and_lanes_alone(play: Play) -> None:
    async def scenario(queue: WorkQueue) -> None:
        await queue.add([work("near"), work("far", model="org/far:1"), work("live", lane="P0")])
        assert await queue.take("one", Wanted(lanes=[("P1", 5)])) == []
        assert ids(await queue.take("one", Wanted(lanes=[("P2", 5)], models=["org/far:1"]))) == ["far"]
        assert await queue.take("one", Wanted(lanes=[("P2", 5)], skipped=["m"])) == []
        assert await queue.take("one", Wanted(lanes=[("P2", 5)], busy=[work("near").stream])) == []
        assert ids(await queue.take("one", Wanted(lanes=[("P0", 5), ("P2", 5)]))) == ["live", "near"]

    play(scenario)


def test_work_of_a_silent_holder_is_claimed_and_its_former_holder_told(play: Play) -> None:
    async def scenario(queue: WorkQueue) -> None:
        await queue.add([work("a"), work("b")])
        held = await queue.take("one", ALL)
        assert await queue.claim("two", ALL, 60.0) == []
        (first, second) = await queue.claim("two", ALL, 0.0)
        assert (first.id, first.deliveries, first.holder) == ("a", 2, "one")
        assert (await queue.renew("one", held)).lost == {held[0].key, held[1].key}
        assert (await queue.renew("two", [first, second])).lost == frozenset()
        await queue.put_back("one", held)  # it is no longer its
        assert await queue.take("three", ALL) == []

    play(scenario)


def test_work_that_is_put_back_counts_as_not_delivered(play: Play) -> None:
    async def scenario(queue: WorkQueue) -> None:
        await queue.add([work("a")])
        for _ in range(MAX_DELIVERIES + 2):
            held = await queue.take("one", ALL)
            assert ids(held) == ["a"]
            await queue.put_back("one", held)
        assert await queue.claim("two", ALL, 0.0, is_dead=True) == []

    play(scenario)


def test_work_delivered_too_often_is_claimed_as_dead_alone(play: Play) -> None:
    async def scenario(queue: WorkQueue) -> None:
        await queue.add([work("poison")])
        await queue.take("one", ALL)
        for number in range(1, MAX_DELIVERIES):
            (found,) = await queue.claim("one", ALL, 0.0)
            assert found.deliveries == number + 1
            assert await queue.claim("one", ALL, 60.0, is_dead=True) == []
        assert await queue.claim("one", ALL, 0.0) == []
        (dead,) = await queue.claim("two", ALL, 0.0, is_dead=True)
        assert (dead.deliveries, dead.holder) == (MAX_DELIVERIES + 1, "one")
        await queue.done([dead])
        assert (await queue.renew("two", [])).depth == 0

    play(scenario)


def test_pull_workers_that_renew_are_counted(play: Play) -> None:
    async def scenario(queue: WorkQueue) -> None:
        assert (await queue.renew("one", [], is_pull_worker=True)).pull_workers == 1
        assert (await queue.renew("two", [], is_pull_worker=True)).pull_workers == 2
        assert (await queue.renew("gateway", [])).pull_workers == 2

    play(scenario)


def test_nothing_is_left_in_redis_when_all_work_has_ended(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        queue = RedisWorkQueue(redis_server.url)
        await queue.add([work(f"{number}", f"t{number % 7}") for number in range(700)])
        while taken := await queue.take("one", ALL):
            await queue.done(taken)
        await queue.close()

    asyncio.run(scenario())
    with redis_server.client() as client:
        left: Any = client.keys("*")
    assert {key for key in left if b"stream:" in key or b"ids" in key or b"turns:" in key} == set()


def test_a_queue_whose_data_was_lost_goes_on(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        queue = RedisWorkQueue(redis_server.url)
        await queue.add([work("a")])
        held = await queue.take("one", ALL)
        with redis_server.client() as client:
            client.flushall()
        assert (await queue.renew("one", held)).lost == frozenset()
        assert await queue.claim("two", ALL, 0.0) == []
        await queue.put_back("one", held)
        assert await queue.add([work("a")]) == 1
        await queue.done(held)
        assert ids(await queue.take("two", ALL)) == ["a"]
        await queue.close()

    asyncio.run(scenario())


def test_the_redis_user_of_pull_workers_reaches_the_work_queue_alone(redis_server: RedisServer) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "pull-workers.md").read_text()
    rules = next(line for line in page.splitlines() if "ACL SETUSER" in line).split()
    with redis_server.client() as client:
        client.execute_command(*rules)

    async def scenario() -> None:
        queue = RedisWorkQueue(redis_server.url.replace("unix://", "unix://worker:PASSWORD@"))
        await queue.add([work("a")])
        held = await queue.take("one", ALL)
        assert ids(held) == ["a"]
        await queue.wait("0-0", 0.01)
        await queue.renew("one", held, is_pull_worker=True)
        await queue.claim("one", ALL, 0.0)
        await queue.put_back("one", held)
        await queue.done(await queue.take("one", ALL))
        await queue.close()
        other = RedisWorkQueue(redis_server.url.replace("unix://", "unix://worker:PASSWORD@"), prefix="inferry:")
        with pytest.raises(QueueUnavailable):
            await other.add([work("b")])
        await other.close()

    try:
        asyncio.run(scenario())
    finally:
        with redis_server.client() as client:
            client.execute_command("ACL", "DELUSER", "worker")
