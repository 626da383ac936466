"""Parents of runs that gateways announce to each other."""

import asyncio
from collections.abc import Sequence

import pytest

from inferry.cluster import run_links
from inferry.cluster.redis_client import RedisAuthority
from inferry.cluster.run_links import Link, ReadLinks, RunLinks
from inferry.domain.shared_limits import AuthorityUnavailable
from support.redis_server import RedisServer
from support.waiting import async_until

PAGE = 2


class FakeStream:
    """A stream in memory. Raises the failures first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.server = "one"
        self.links: list[Link] = []
        self.exchanges = 0

    def lose(self) -> None:
        self.server, self.links = "two", []

    async def exchange_links(self, position: str, links: Sequence[Link]) -> ReadLinks:
        await asyncio.sleep(0)
        self.exchanges += 1
        if self.failures:
            raise self.failures.pop(0)
        self.links += links
        start = int(position.partition("-")[0])
        found = self.links[start : start + PAGE]
        return ReadLinks(f"{start + len(found)}-0", found, len(found) < PAGE, self.server)


def a_gateway(stream: FakeStream | RedisAuthority) -> tuple[RunLinks, list[Link]]:
    learned: list[Link] = []
    links = RunLinks(stream, lambda *link: learned.append(link), 0.0)
    links.start()
    return links, learned


def test_a_gateway_that_is_synced_knows_all_links_announced_before() -> None:
    async def scenario() -> None:
        stream = FakeStream()
        (first, _), (second, learned) = a_gateway(stream), a_gateway(stream)
        for number in range(5):
            first.announce("acme", str(number), "root")
        await first.synced()
        await second.synced()
        assert learned == [("acme", str(number), "root") for number in range(5)]
        await first.close()
        await second.close()

    asyncio.run(scenario())


def test_links_that_are_announced_together_are_one_exchange_and_the_first_parent_counts() -> None:
    async def scenario() -> None:
        stream = FakeStream()
        links, _ = a_gateway(stream)
        for parent in ("first", "second"):
            links.announce("acme", "run", parent)
        await asyncio.gather(*[links.synced() for _ in range(100)])
        assert stream.links == [("acme", "run", "first")]
        assert stream.exchanges == 1
        await links.close()

    asyncio.run(scenario())


def test_links_of_other_gateways_are_read_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stream = FakeStream()
        links, learned = a_gateway(stream)
        stream.links.append(("acme", "run", "root"))
        await async_until(lambda: learned == [("acme", "run", "root")])
        await links.close()

    monkeypatch.setattr(run_links, "POLL_S", 0.01)
    asyncio.run(scenario())


def test_an_exchange_that_fails_is_repeated_with_its_links() -> None:
    async def scenario() -> None:
        stream = FakeStream(AuthorityUnavailable(), ValueError())
        links, learned = a_gateway(stream)
        links.announce("acme", "run", "root")
        await links.synced()
        assert learned == stream.links == [("acme", "run", "root")]
        await links.close()

    asyncio.run(scenario())


def test_links_are_repeated_to_a_server_that_has_lost_them() -> None:
    async def scenario() -> None:
        stream = FakeStream()
        (first, _), (second, learned) = a_gateway(stream), a_gateway(stream)
        first.announce("acme", "run", "root")
        await first.synced()
        await second.synced()
        stream.lose()
        learned.clear()
        await first.synced()
        await second.synced()
        assert learned == [("acme", "run", "root")]
        await first.close()
        await second.close()

    asyncio.run(scenario())


def test_redis_carries_more_links_than_one_exchange_has_room_for(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        ends = [RedisAuthority(redis_server.url, 3000, timeout_s=60.0) for _ in range(2)]
        (first, own), (second, learned) = a_gateway(ends[0]), a_gateway(ends[1])
        expected = [("acmé", f"run-{number}", "root") for number in range(2500)]
        for link in expected:
            first.announce(*link)
        await first.synced()
        await second.synced()
        assert own == learned == expected
        for links, end in ((first, ends[0]), (second, ends[1])):
            await links.close()
            await end.close()

    asyncio.run(scenario())
