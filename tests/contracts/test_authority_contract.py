"""The authority over shared limits and ownership behaves the same in memory and in Redis."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import pytest

from inferry.cluster.limit_authority import InMemoryAuthority
from inferry.cluster.ownership import NO_OWNER, Claim, InMemoryOwnership, Owner
from inferry.cluster.redis_client import RedisAuthority
from inferry.domain.shared_limits import REBUILDING, Answer, Ask, AuthorityUnavailable, Exchanged, Holding, LimitKind
from support.redis_server import RedisServer

TTL_MS = 400


def _ms() -> int:
    return int(time.time() * 1000)


class MemoryAuthority:
    """The reference, on the clock of this machine."""

    def __init__(self) -> None:
        self.limits = InMemoryAuthority(TTL_MS)
        self.owners = InMemoryOwnership(TTL_MS, _ms())

    async def exchange(self, holder: str, number: int, generation: int, asks: Sequence[Ask]) -> Exchanged:
        return self.limits.exchange(holder, number, generation, asks, _ms())

    async def rebuild(
        self, generation: int, spending: Sequence[tuple[str, int, int]], holdings: Sequence[Holding]
    ) -> None:
        self.limits.rebuild(generation, spending, holdings, _ms())

    async def claim(self, claim: Claim) -> Owner:
        return self.owners.claim(claim, _ms())

    async def resign(self, domain: str, gateway: str, epoch: int) -> None:
        self.owners.resign(domain, gateway, epoch)

    async def restart(self) -> None:
        self.limits.lose_state()
        self.owners.lose_state(_ms())

    async def close(self) -> None:
        pass


class RealAuthority(RedisAuthority):
    def __init__(self, server: RedisServer) -> None:
        super().__init__(server.url, TTL_MS, timeout_s=60.0)
        self._server = server

    async def restart(self) -> None:
        await asyncio.to_thread(self._server.restart)


Authority = MemoryAuthority | RealAuthority


@pytest.fixture(params=["memory", "redis"])
def make_authority(request: pytest.FixtureRequest) -> Callable[[], Authority]:
    """Makes the authority on the event loop of the test."""
    if request.param == "memory":
        return MemoryAuthority
    server = request.getfixturevalue("redis_server")
    return lambda: RealAuthority(server)


def budget(limit: int = 1000, **values: int) -> Ask:
    return Ask("account", LimitKind.BUDGET, limit, **values)


async def answer(authority: Authority, holder: str, number: int, ask: Ask, generation: int = 1) -> Answer:
    found = await authority.exchange(holder, number, generation, [ask])
    assert found.generation == generation
    assert found.answers is not None
    return found.answers[0]


def test_an_authority_without_state_grants_nothing_until_one_gateway_has_rebuilt_it(
    make_authority: Callable[[], Authority],
) -> None:
    async def scenario() -> None:
        authority = make_authority()
        assert await authority.exchange("a", 1, 0, [budget(need=1, want=1)]) == Exchanged(0, None)
        assert await authority.exchange("b", 1, 0, [budget(need=1, want=1)]) == Exchanged(REBUILDING, None)
        await authority.rebuild(1, [("account", 700, 60)], [Holding("dead", "account", 200)])
        assert await authority.exchange("b", 1, 0, [budget(need=1, want=1)]) == Exchanged(1, None)
        assert await answer(authority, "b", 1, budget(need=101, want=101)) == Answer(100, 100, 200, 700)
        await authority.rebuild(1, [], [])
        assert await answer(authority, "b", 2, budget()) == Answer(0, 100, 200, 700), "an older rebuild changes nothing"
        await authority.restart()
        assert (await authority.exchange("a", 9, 1, [budget(need=1, want=1)])).answers is None
        await authority.rebuild(2, [("account", 800, 60)], [])
        assert await answer(authority, "b", 2, budget(need=5, want=5), 2) == Answer(5, 5, 0, 800)
        await authority.close()

    asyncio.run(scenario())


def test_settled_and_held_never_exceed_the_limit(make_authority: Callable[[], Authority]) -> None:
    async def scenario() -> None:
        authority = make_authority()
        await authority.rebuild(1, [], [])
        assert await answer(authority, "a", 1, budget(need=10, want=500)) == Answer(31, 31, 0, 0)
        assert await answer(authority, "b", 1, budget(need=900, want=2000)) == Answer(900, 900, 31, 0)
        assert await answer(authority, "a", 2, budget(need=100, want=100)) == Answer(69, 100, 900, 0)
        assert await answer(authority, "a", 3, budget(need=1, want=1)) == Answer(0, 100, 900, 0)
        assert await answer(authority, "b", 2, budget(spent=600, returned=300)) == Answer(0, 0, 100, 600, is_wanted=1)
        assert await answer(authority, "a", 4, budget(limit=500, need=1, want=1)) == Answer(0, 100, 0, 600)
        assert await answer(authority, "a", 5, budget(spent=100, need=50, want=50)) == Answer(50, 50, 0, 700)
        await authority.close()

    asyncio.run(scenario())


def test_an_exchange_whose_answer_was_lost_is_answered_again_and_not_applied_twice(
    make_authority: Callable[[], Authority],
) -> None:
    async def scenario() -> None:
        authority = make_authority()
        await authority.rebuild(1, [], [])
        first = await answer(authority, "a", 1, budget(need=10, want=10))
        assert await answer(authority, "a", 1, budget(need=10, want=10)) == first
        assert await answer(authority, "a", 2, budget()) == Answer(0, 10, 0, 0)
        await authority.close()

    asyncio.run(scenario())


def test_the_base_counts_for_an_account_that_nobody_holds(make_authority: Callable[[], Authority]) -> None:
    async def scenario() -> None:
        authority = make_authority()
        await authority.rebuild(1, [], [])
        assert await answer(authority, "a", 1, budget(base=990, need=5, want=5)) == Answer(5, 5, 0, 990)
        assert await answer(authority, "b", 1, budget(base=995, need=1, want=1)) == Answer(1, 1, 5, 990)
        await authority.close()

    asyncio.run(scenario())


def test_amounts_beyond_single_precision_are_exact(make_authority: Callable[[], Authority]) -> None:
    async def scenario() -> None:
        authority = make_authority()
        most = 2**53 - 1
        await authority.rebuild(1, [("account", most - 10, 60)], [])
        assert await answer(authority, "a", 1, budget(limit=most, need=11, want=11)) == Answer(10, 10, 0, most - 10)
        assert await answer(authority, "a", 2, budget(limit=most, spent=10)) == Answer(0, 0, 0, most)
        await authority.close()

    asyncio.run(scenario())


def test_a_rate_is_granted_from_one_bucket(make_authority: Callable[[], Authority]) -> None:
    async def scenario() -> None:
        authority = make_authority()
        await authority.rebuild(1, [], [])
        ask = Ask("rate", LimitKind.RATE, 6, need=4, want=4)
        assert (await answer(authority, "a", 1, ask)).granted == 4
        assert (await answer(authority, "b", 1, ask)).granted == 2
        assert (await answer(authority, "b", 2, ask._replace(returned=2))).granted == 2
        await authority.close()

    asyncio.run(scenario())


def test_after_a_restart_a_bucket_starts_empty(make_authority: Callable[[], Authority]) -> None:
    async def scenario() -> None:
        authority = make_authority()
        await authority.rebuild(2, [], [])
        ask = Ask("rate", LimitKind.RATE, 6, need=4, want=4)
        assert (await answer(authority, "a", 1, ask, 2)).granted == 0
        await authority.close()

    asyncio.run(scenario())


def test_slots_of_a_gateway_that_is_gone_are_free_after_the_ttl(make_authority: Callable[[], Authority]) -> None:
    async def scenario() -> None:
        authority = make_authority()
        await authority.rebuild(1, [], [])
        ask = Ask("slots", LimitKind.SLOTS, 2, need=2, want=2)
        assert await answer(authority, "a", 1, ask) == Answer(2, 2, 0, 0)
        number = 1
        async with asyncio.timeout(60):
            while (await answer(authority, "b", number, ask)).granted == 0:
                number += 1
                await asyncio.sleep(0.02)
        assert number > 1
        assert await answer(authority, "a", 2, ask) == Answer(0, 0, 2, 0)
        assert await answer(authority, "a", 3, ask._replace(base=2, need=0)) == Answer(0, 0, 2, 0), "what a still uses"
        await authority.close()

    asyncio.run(scenario())


def test_one_gateway_owns_a_domain_and_the_next_one_has_a_larger_epoch(
    make_authority: Callable[[], Authority],
) -> None:
    async def owned(authority: Authority, gateway: str, seen: int = 0) -> Owner:
        async with asyncio.timeout(60):
            while (found := await authority.claim(Claim("d", gateway, f"at-{gateway}", seen))).gateway != gateway:
                await asyncio.sleep(0.02)
        return found

    async def scenario() -> None:
        authority = make_authority()
        assert await authority.claim(Claim("d", "a", "at-a", 0)) == NO_OWNER, "the last owner may still send"
        first = await owned(authority, "a")
        assert (first.gateway, first.address) == ("a", "at-a")
        assert await authority.claim(Claim("d", "b", "at-b", 0)) == first
        assert await owned(authority, "a") == first, "a renewal keeps the epoch"
        second = await owned(authority, "b")
        assert second.epoch > first.epoch
        await authority.resign("d", "a", first.epoch)
        assert await authority.claim(Claim("d", "a", "at-a", 0)) == second
        await authority.resign("d", "b", second.epoch)
        third = await authority.claim(Claim("d", "a", "at-a", 0))
        assert third.gateway == "a"
        await authority.restart()
        assert await authority.claim(Claim("d", "b", "at-b", 0)) == NO_OWNER
        assert (await owned(authority, "b", seen=2**45)).epoch == 2**45 + 1
        await authority.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(10))
def test_redis_answers_as_the_reference_does(redis_server: RedisServer, seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(f"{seed}/authority")
        pair: list[Authority] = [MemoryAuthority(), RealAuthority(redis_server)]
        spending = [(f"account-{number}", rng.randrange(2000), 60) for number in range(3)]
        holdings = [Holding(f"h{number}", "account-1", rng.randrange(50)) for number in range(3)]
        held: dict[tuple[str, str], int] = {(one.holder, one.account): one.amount for one in holdings}
        for one in pair:
            await one.rebuild(1, spending, holdings)
        for number in range(1, 60):
            holder = f"h{rng.randrange(3)}"
            asks = []
            for account in rng.sample([f"account-{number}" for number in range(4)], rng.randint(1, 4)):
                has = held.get((holder, account), 0)
                spent = rng.randint(0, has)
                need = rng.choice([0, rng.randrange(300)])
                asks.append(
                    Ask(
                        account,
                        LimitKind.BUDGET,
                        rng.choice([2000, 3000, 10**12]),
                        base=rng.randrange(100),
                        spent=spent,
                        returned=rng.randint(0, has - spent),
                        need=need,
                        want=need + rng.randrange(500),
                    )
                )
            first, second = [await one.exchange(holder, number, 1, asks) for one in pair]
            assert first == second
            assert first.answers is not None
            held |= {(holder, ask.account): one.held for ask, one in zip(asks, first.answers, strict=True)}
        await pair[1].close()

    asyncio.run(scenario())


def test_a_restart_that_kept_its_files_counts_as_a_loss_of_state() -> None:
    async def scenario(server: RedisServer) -> None:
        authority = RealAuthority(server)
        await authority.rebuild(1, [], [])
        assert (await answer(authority, "a", 1, budget(need=1, want=1))).granted
        await authority.restart()
        assert (await authority.exchange("a", 2, 1, [budget(need=1, want=1)])).answers is None
        await authority.close()

    with RedisServer(persists=True) as server:
        asyncio.run(scenario(server))


def test_a_server_that_does_not_answer_is_unavailable(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        authority = RedisAuthority(redis_server.url, TTL_MS, timeout_s=0.05)
        redis_server.pause()
        with pytest.raises(AuthorityUnavailable):
            await authority.exchange("a", 1, 1, [])
        redis_server.resume()
        redis_server.kill()
        with pytest.raises(AuthorityUnavailable):
            await authority.claim(Claim("d", "a", "", 0))
        await authority.close()

    asyncio.run(scenario())


def test_cancelled_runs_reach_a_reader_that_was_away(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        authority = RealAuthority(redis_server)
        position = await authority.last_cancelled()
        await authority.announce_cancelled("a", "acme", "run-1")
        await authority.announce_cancelled("b", "acme", "run-2")
        position, runs = await authority.next_cancelled(position)
        assert runs == [("a", "acme", "run-1"), ("b", "acme", "run-2")]
        assert await authority.last_cancelled() == position
        waiting = asyncio.create_task(authority.next_cancelled(position))
        await authority.announce_cancelled("a", "acme", "run-3")
        assert (await waiting)[1] == [("a", "acme", "run-3")]
        await authority.close()

    asyncio.run(scenario())
