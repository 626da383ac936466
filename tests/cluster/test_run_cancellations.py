"""Cancelled runs that gateways announce to each other."""

import asyncio
import socket

import pytest

from inferry.cluster import cancelled_runs, redis_client
from inferry.cluster.cancelled_runs import CancelledRuns
from inferry.cluster.redis_client import RedisAuthority
from inferry.domain.shared_limits import AuthorityUnavailable
from support.waiting import async_until


class FakeStream:
    """Raises the failures first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.is_up = True
        self.announced: list[str] = []
        self.announcing = self.most_announcing = 0

    async def announce_cancelled(self, gateway: str, tenant: str, run_id: str) -> None:
        self.announcing += 1
        self.most_announcing = max(self.announcing, self.most_announcing)
        await asyncio.sleep(0)
        self.announcing -= 1
        if not self.is_up:
            raise AuthorityUnavailable
        self.announced.append(run_id)

    async def next_cancelled(self, position: str) -> tuple[str, list[tuple[str, str, str]]]:
        if self.failures:
            raise self.failures.pop(0)
        await asyncio.sleep(0.01)
        return "2-0", [("other", "acme", "run")] if position == "0-0" else []


def test_an_unexpected_error_does_not_end_the_reader() -> None:
    async def scenario() -> None:
        applied: list[tuple[str, str]] = []
        runs = CancelledRuns("own", FakeStream(ValueError()), lambda *run: applied.append(run), 0.0)
        runs.start()
        await async_until(lambda: applied == [("acme", "run")])
        await runs.close()

    asyncio.run(scenario())


def test_a_redis_that_does_not_answer_is_unavailable_to_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:  # connects, and reads nothing
            authority = RedisAuthority(f"redis://127.0.0.1:{server.getsockname()[1]}/0", 3000)
            async with asyncio.timeout(60.0):
                with pytest.raises(AuthorityUnavailable):
                    await authority.next_cancelled("0-0")
            await authority.close()

    monkeypatch.setattr(redis_client, "READ_TIMEOUT_S", 0.05)
    asyncio.run(scenario())


def test_runs_are_announced_one_at_a_time_and_as_many_as_the_queue_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stream = FakeStream()
        stream.is_up = False
        runs = CancelledRuns("own", stream, lambda *_: None, 0.0)
        runs.start()
        for number in range(20):
            runs.announce("acme", str(number))
        await async_until(lambda: stream.most_announcing)
        stream.is_up = True
        await async_until(lambda: stream.announced == [str(number) for number in range(10)])
        assert stream.most_announcing == 1
        await runs.close()

    monkeypatch.setattr(cancelled_runs, "MAX_UNANNOUNCED", 10)
    asyncio.run(scenario())
