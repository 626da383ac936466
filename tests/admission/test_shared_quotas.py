"""Rates and concurrent calls that several gateways share, without the gateways."""

from typing import Any

import pytest

from admission.builders import NOON, a_call, a_caller, used
from inferry.admission.grant_protocol import Exchange, GrantProtocol, ReadHoldings, Rebuild, WriteHoldings
from inferry.admission.grants import GrantTracker
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.cluster.limit_authority import InMemoryAuthority
from inferry.domain.errors import GatewayError, RateLimited, TenantConcurrency
from inferry.domain.values import replace

TTL_S = 3.0


class Member:
    """A gateway's gate and grants, with an authority and a database that answer at once."""

    def __init__(self, name: str, authority: InMemoryAuthority, database: dict[str, int]) -> None:
        self.name, self.authority, self.database = name, authority, database
        self.tracker = GrantTracker()
        self.gate = QuotaGate({}, watermarks=self.tracker)
        self.protocol = GrantProtocol(self.tracker, TTL_S)
        self.now = 0.0
        self._calls = 0
        self.exchange()

    def exchange(self, *, sweeps: bool = False) -> None:
        if sweeps:
            self.tracker.sweep(0, 0)
        while (step := self.protocol.next_step(self.now)) is not None:
            match step:
                case Exchange(number, generation, asks):
                    found = self.authority.exchange(self.name, number, generation, asks, int(self.now * 1000))
                    self.protocol.exchanged(found, self.now, self.now)
                case WriteHoldings(generation):
                    self.protocol.written(generation, self.now)
                case ReadHoldings():
                    self.protocol.read(self.database["generation"], {})
                case Rebuild():
                    self.database["generation"] += 1
                    self.authority.rebuild(self.database["generation"], [], [], int(self.now * 1000))
                    self.protocol.rebuilt()

    def admit(self, **limits: Any) -> Permit:
        """Raises the refusal, at once or by the authority."""
        self._calls += 1
        job = replace(a_call(run=f"run-{self._calls}"), job_id=f"{self.name}-{self._calls}")
        permit = self.gate.admit(job, a_caller(**limits), (), self.now, NOON)
        if permit.watermark_batch > self.tracker.written:
            self.exchange()
            if self.tracker.uncovered([permit]):
                error = self.tracker.uncovered_error(permit)
                assert error is not None
                self.gate.settle(permit, None, self.now, NOON)
                raise error
        return permit

    def end(self, permit: Permit) -> None:
        self.gate.settle(permit, used(), self.now, NOON)


@pytest.fixture
def pair() -> tuple[Member, Member]:
    authority, database = InMemoryAuthority(int(TTL_S * 1000)), {"generation": 0}
    return Member("a", authority, database), Member("b", authority, database)


def count(member: Member, most: int, **limits: int) -> int:
    for number in range(most):
        try:
            member.admit(**limits)
        except GatewayError:
            return number
    return most


def test_two_gateways_admit_one_minutes_requests_together(pair: tuple[Member, Member]) -> None:
    first, second = pair
    assert count(first, 6, requests_per_minute=10) == 6
    assert 3 <= count(second, 20, requests_per_minute=10) <= 4


def test_a_refused_call_is_told_when_the_shared_bucket_has_refilled(pair: tuple[Member, Member]) -> None:
    first, second = pair
    count(first, 100, requests_per_minute=60)
    with pytest.raises(RateLimited) as refused:
        second.admit(requests_per_minute=60)
    assert refused.value.retry_after_s == pytest.approx(1.0)
    second.now = 0.5
    with pytest.raises(RateLimited) as refused:
        second.admit(requests_per_minute=60)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    second.now = 1.01
    second.admit(requests_per_minute=60)


def test_what_a_gateway_does_not_use_of_a_rate_is_returned(pair: tuple[Member, Member]) -> None:
    first, second = pair
    first.end(first.admit(requests_per_minute=640))
    first.now = 2.5
    first.exchange(sweeps=True)
    first.now = 5.0
    first.exchange(sweeps=True)
    second.now = 5.0
    assert count(second, 1000, requests_per_minute=640) >= 640


def test_tokens_per_minute_count_what_was_used(pair: tuple[Member, Member]) -> None:
    first, second = pair
    permit = first.admit(tokens_per_minute=60)  # reserves 30
    first.end(permit)
    assert count(first, 100, tokens_per_minute=60) + count(second, 100, tokens_per_minute=60) == 1


def test_concurrent_calls_of_two_gateways_share_one_limit(pair: tuple[Member, Member]) -> None:
    first, second = pair
    held = [first.admit(max_concurrent=3) for _ in range(2)]
    second.admit(max_concurrent=3)
    with pytest.raises(TenantConcurrency):
        second.admit(max_concurrent=3)
    first.end(held.pop())
    first.exchange(sweeps=True)
    second.now = 200.0
    second.exchange()
    first.now = 200.0
    first.exchange()
    second.admit(max_concurrent=3)
    with pytest.raises(TenantConcurrency):
        first.admit(max_concurrent=3)


def test_a_gateway_without_contact_takes_nothing_from_what_it_was_granted(pair: tuple[Member, Member]) -> None:
    first, _ = pair
    first.admit(requests_per_minute=6400, max_concurrent=640)
    first.protocol.check_validity(TTL_S)
    permit = first.gate.admit(a_call(), a_caller(requests_per_minute=6400, max_concurrent=640), (), TTL_S, NOON)
    assert permit.watermark_batch > first.tracker.written


def test_calls_of_a_gateway_that_was_cut_off_give_way_to_those_of_others(pair: tuple[Member, Member]) -> None:
    first, second = pair
    held = [first.admit(max_concurrent=10) for _ in range(10)]
    second.now = 4.0
    assert count(second, 11, max_concurrent=10) == 10
    first.now = 4.0
    first.exchange()
    first.end(held.pop())
    with pytest.raises(TenantConcurrency):
        first.admit(max_concurrent=10)


def test_a_tenant_in_shadow_is_never_held(pair: tuple[Member, Member]) -> None:
    first, _ = pair
    for number in range(3):
        job = replace(a_call(), job_id=f"job-{number}")
        permit = first.gate.admit(job, a_caller(shadow=True, requests_per_minute=1), (), 0.0, NOON)
        assert permit.watermark_batch == 0
        first.exchange()
    assert first.gate.shadow_refused == {"requests_per_minute": 1}


def test_limits_are_reported_as_all_gateways_have_used_them(pair: tuple[Member, Member]) -> None:
    first, second = pair
    caller = a_caller(requests_per_minute=100)
    count(first, 60, requests_per_minute=100)
    second.admit(requests_per_minute=100)
    status = second.gate.rate_limit_status(caller, 0.0)
    assert status is not None
    assert 35 <= (status.requests_left or 0) <= 40
