"""Failures of the work queue are counted, and logged once per outage."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from inferry.cluster.redis_work_queue import OutageLog, RedisWorkQueue
from inferry.domain.work_queue import NewWork, QueueUnavailable, Wanted
from support.redis_server import RedisServer


def test_every_failure_is_counted_and_an_outage_is_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    outages = OutageLog()
    for _ in range(3):
        outages.failed("take", "Redis: ConnectionError")
        outages.failed("renew", "Redis: ConnectionError")
    outages.succeeded("take")
    outages.succeeded("claim")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    outages.succeeded("renew")
    outages.succeeded("take")
    assert [record.getMessage() for record in caplog.records] == [
        "the work queue does not answer: take: Redis: ConnectionError",
        "the work queue answers again (6 failures so far)",
    ]
    assert outages.failures == 6
    outages.failed("take", "Redis: TimeoutError")
    assert len(caplog.records) == 3


def test_a_redis_that_does_not_answer_is_counted_in_every_operation(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        queue = RedisWorkQueue("unix:///nonexistent/redis.sock")
        wanted = Wanted(lanes=[("P2", 1)])
        operations: list[Callable[[], Awaitable[object]]] = [
            lambda: queue.add([NewWork("a", "P2", "m", "t")]),
            lambda: queue.take("one", wanted),
            lambda: queue.wait("0-0", 1.0),
            lambda: queue.renew("one", []),
            lambda: queue.claim("one", wanted, 6.0),
        ]
        for operation in operations:
            with pytest.raises(QueueUnavailable):
                await operation()
        assert queue.failures == len(operations)
        await queue.close()

    asyncio.run(scenario())
    assert len(caplog.records) == 1


def test_the_log_names_what_redis_refuses(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        queue = RedisWorkQueue(redis_server.url)
        with redis_server.client() as client:
            client.config_set("maxmemory", 1)
        try:
            with pytest.raises(QueueUnavailable, match="OutOfMemoryError"):
                await queue.add([NewWork("a", "P2", "m", "t")])
        finally:
            with redis_server.client() as client:
                client.config_set("maxmemory", 0)
        assert await queue.add([NewWork("a", "P2", "m", "t")]) == 1
        assert queue.failures == 1
        await queue.close()

    asyncio.run(scenario())
    assert ["does not answer" in record.getMessage() for record in caplog.records] == [True, False]
