"""A gateway that claims its domain, and what follows where it cannot take its role."""

import asyncio
from collections.abc import Callable

import pytest

from inferry.cli.election_wiring import ClusterMember
from inferry.cluster.election import Election
from inferry.cluster.ownership import Claim, InMemoryOwnership, Owner, OwnershipLease
from inferry.domain.clock import SystemClock
from support.waiting import async_until


class Authority:
    def __init__(self) -> None:
        self._domains = InMemoryOwnership(ttl_ms=3000, now_ms=-3000)
        self.resigned: list[int] = []
        self.claims = 0

    async def claim(self, claim: Claim) -> Owner:
        self.claims += 1
        return self._domains.claim(claim, 0)

    async def resign(self, domain: str, gateway: str, epoch: int) -> None:
        self._domains.resign(domain, gateway, epoch)
        self.resigned.append(epoch)


class ClosingRoles:
    """Notes how often the domain was claimed when it is closed."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self.claims: list[int] = []

    async def close(self) -> None:
        self.claims.append(self._authority.claims)
        await asyncio.sleep(0.05)  # several intervals
        self.claims.append(self._authority.claims)
        assert not self._authority.resigned


class ClosingRole:
    async def close(self) -> None: ...


class FailingRole:
    """Cannot own the workers at first."""

    def __init__(self, failures: int = 1) -> None:
        self.epochs: list[int] = []
        self._failures = failures

    async def become_owner(self, epoch: int, may_send: Callable[[], bool]) -> None:
        self.epochs.append(epoch)
        if len(self.epochs) <= self._failures:
            raise OSError("the port is in use")

    async def become_ingress(self, address: str, epoch: int) -> None:
        raise AssertionError


def test_a_gateway_that_cannot_own_the_workers_resigns(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        authority, role = Authority(), FailingRole()
        lease = OwnershipLease("workers", "a", "a:1", 0.03)
        election = Election(lease, authority, role, SystemClock())
        election.start()
        await async_until(lambda: len(role.epochs) == 2)
        first, second = role.epochs
        assert second > first
        assert authority.resigned == [first]
        await election.close()
        assert authority.resigned == [first, second]

    asyncio.run(asyncio.wait_for(scenario(), 100))
    (problem,) = [record for record in caplog.records if "cannot change the role" in record.message]
    assert problem.message.endswith("the port is in use")
    assert not problem.exc_info


def test_a_closing_gateway_claims_nothing_and_resigns_last() -> None:
    async def scenario() -> None:
        authority, role = Authority(), FailingRole(failures=0)
        lease = OwnershipLease("workers", "a", "a:1", 0.03)
        election, roles = Election(lease, authority, role, SystemClock()), ClosingRoles(authority)
        member = ClusterMember(None, None, roles, ClosingRole(), election)  # type: ignore[arg-type]
        member.start()
        await async_until(lambda: len(role.epochs) == 1)
        await member.close()
        before, after = roles.claims
        assert before == after
        assert authority.resigned == role.epochs

    asyncio.run(asyncio.wait_for(scenario(), 100))
