"""A task that is cancelled during a request to Redis ends, also where redis-py swallows the cancellation."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from inferry.cluster.kept_cancellation import kept_cancellation
from inferry.cluster.ownership import Claim
from inferry.cluster.redis_client import RedisAuthority
from inferry.cluster.redis_work_queue import RedisWorkQueue
from inferry.domain.work_queue import Wanted

NOWHERE = "unix:///nowhere"


async def cancelled_during(call: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
    """The task of a loop around the call, which was cancelled once, a few steps of the event loop later."""

    async def repeat() -> None:
        while True:
            await call()

    task = asyncio.create_task(repeat())
    await asyncio.sleep(0)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    has_ended = task.done()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert has_ended, "it went on"
    return task


def swallowing(answer: Any) -> Callable[..., Awaitable[Any]]:
    """A request that answers when it is cancelled, as `asyncio.wait_for` may before Python 3.12."""
    is_first = True

    async def call(*_: object, **__: object) -> Any:
        nonlocal is_first
        was_first, is_first = is_first, False
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not was_first:
                raise
            if isinstance(answer, Exception):
                raise answer from None
        return answer

    return call


@pytest.mark.parametrize("answer", [b"\x90", ConnectionError("reset")])
def test_a_cancelled_consumer_of_the_work_queue_ends(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        queue = RedisWorkQueue(NOWHERE)
        monkeypatch.setattr(queue, "_take", swallowing(answer))
        task = await cancelled_during(lambda: queue.take("c", Wanted(lanes=[("P2", 1)])))
        assert task.cancelled()
        await queue.close()

    asyncio.run(main())


def test_a_cancelled_claim_of_ownership_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        authority = RedisAuthority(NOWHERE, 1000)
        monkeypatch.setattr(authority, "_claim", swallowing([b"g", b"a", b"1"]))
        task = await cancelled_during(lambda: authority.claim(Claim("d", "g", "a", 0)))
        assert task.cancelled()
        await authority.close()

    asyncio.run(main())


def test_requests_of_a_task_that_was_cancelled_before_are_answered() -> None:
    """What is being cleaned up after a cancellation may still ask."""

    async def main() -> list[str]:
        found = []

        async def clean_up() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                with kept_cancellation():
                    await asyncio.sleep(0)
                    found.append("answered")

        task = asyncio.create_task(clean_up())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    assert asyncio.run(main()) == ["answered"]
