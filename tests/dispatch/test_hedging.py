"""Overdue calls are retried once, before their first token, if the whole worker is silent, within a small share."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from inferry.dispatch.hedging import (
    MAX_HEDGE_TOKENS,
    MIN_HISTORY,
    MIN_TTFT_S,
    TTFT_FACTOR,
    HedgePolicy,
    TtftHistory,
    may_hedge,
)
from inferry.domain.attempts import Attempt
from inferry.domain.errors import WorkerTimeout
from inferry.domain.jobs import ResumePoint
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.streams import Done, Failed
from inferry.domain.values import replace
from inferry.domain.workers import Phase
from support.builders import a_job
from support.loop_helpers import read
from support.virtual_gateway import FreezingWorker, VirtualGateway, a_virtual_gateway
from support.virtual_time import run_virtual


def sent(at: float, tokens: int = 10, **fields: int) -> Attempt:
    job = replace(a_job(at=at, tokens=tokens), **fields)
    attempt = Attempt(job)
    plan = BatchPlan(plan_id=0, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=at)
    attempt.sent(plan, at)
    return attempt


def with_history(overdue: HedgePolicy, seconds: float = 0.1, count: int = MIN_HISTORY) -> None:
    for _ in range(count):
        attempt = sent(0.0)
        overdue.sent(attempt, 0.0)
        overdue.first_token(attempt, seconds)


# -- which they are --------------------------------------------------------------------------------------------------


def test_a_first_token_is_overdue_after_a_multiple_of_its_expected_time() -> None:
    overdue = HedgePolicy(1.0)
    with_history(overdue, 0.5)
    attempt = sent(100.0)
    overdue.sent(attempt, 0.0)
    assert overdue.due(lambda _: 99.0, 100.0 + TTFT_FACTOR * 0.5 - 0.01) == []
    assert overdue.due(lambda _: 99.0, 100.0 + TTFT_FACTOR * 0.5 + 0.01) == [attempt]


def test_the_overdue_time_has_a_minimum() -> None:
    overdue = HedgePolicy(1.0)
    with_history(overdue, 0.001)
    attempt = sent(100.0)
    overdue.sent(attempt, 0.0)
    assert overdue.due(lambda _: 99.0, 100.0 + MIN_TTFT_S - 0.01) == []
    assert overdue.due(lambda _: 99.0, 100.0 + MIN_TTFT_S + 0.01) == [attempt]


def test_a_longer_prompt_is_given_more_time() -> None:
    history = TtftHistory()
    for _ in range(MIN_HISTORY):
        history.learn(100, 0.4)
    short, long = history.limit_s(100), history.limit_s(10_000)
    assert short is not None
    assert long is not None
    assert long > 10 * short


def test_no_call_is_overdue_without_history_or_with_recent_activity_of_its_worker() -> None:
    overdue = HedgePolicy(1.0)
    attempt = sent(100.0)
    overdue.sent(attempt, 0.0)
    assert overdue.due(lambda _: 99.0, 200.0) == [], "no history"
    with_history(overdue)
    assert overdue.due(lambda _: 100.1, 200.0) == [], "heard since"
    assert overdue.due(lambda _: None, 200.0) == [], "not watched"
    assert overdue.due(lambda _: 99.0, 200.0) == [attempt]


def test_a_call_with_a_first_token_or_an_end_is_never_overdue() -> None:
    overdue = HedgePolicy(1.0)
    with_history(overdue)
    first, second = sent(100.0), sent(100.0)
    overdue.sent(first, 0.0)
    overdue.sent(second, 0.0)
    overdue.first_token(first, 100.1)
    overdue.ended(second, 100.1)
    assert overdue.due(lambda _: 99.0, 200.0) == []


def test_a_call_is_hedged_once_and_only_before_its_first_token() -> None:
    assert may_hedge(sent(0.0))
    assert may_hedge(sent(0.0, attempt=3, preemptions=1, unreachable_attempts=1))
    assert not may_hedge(sent(0.0, attempt=2))
    seen = sent(0.0)
    seen.output_tokens = 1
    assert not may_hedge(seen)
    assert not may_hedge(Attempt(replace(a_job(), resume_point=ResumePoint((1,), (2,)))))


@given(st.lists(st.booleans(), max_size=2000), st.floats(0.0, 0.2))
def test_hedged_calls_never_exceed_their_share(wanted: list[bool], share: float) -> None:
    overdue = HedgePolicy(share)
    calls = retried = 0
    for wants in wanted:
        if wants:
            retried += overdue.take_token()
        else:
            overdue.sent(sent(0.0), 0.0)
            calls += 1
        assert retried <= share * calls + 1e-6


def test_unused_hedging_budget_accumulates_up_to_a_small_burst() -> None:
    overdue = HedgePolicy(0.5)
    with_history(overdue, count=1000)
    assert sum(overdue.take_token() for _ in range(100)) == MAX_HEDGE_TOKENS


@given(
    st.lists(st.floats(0.001, 5.0), min_size=MIN_HISTORY, max_size=300),
    st.integers(1, 100_000),
    st.floats(0.0, 1000.0),
    st.floats(-10.0, 10.0),
)
def test_an_overdue_call_is_late_and_its_worker_is_silent(
    history: list[float], tokens: int, waited_s: float, heard_s: float
) -> None:
    overdue = HedgePolicy(1.0)
    for seconds in history:
        one = sent(0.0)
        overdue.sent(one, 0.0)
        overdue.first_token(one, seconds)
    attempt = sent(1000.0, tokens)
    overdue.sent(attempt, 0.0)
    if overdue.due(lambda _: 1000.0 + heard_s, 1000.0 + waited_s):
        assert heard_s < 0
        assert waited_s >= MIN_TTFT_S
        assert waited_s >= max(history[-100:]) * (1 if tokens >= 10 else 0)


# -- what becomes of them --------------------------------------------------------------------------------------------


async def warmed(house: VirtualGateway, calls: int) -> None:
    """Both workers have a history, and that many calls have earned their share of retries."""
    for _ in range(calls // 20):
        await asyncio.gather(*(read(house.submit()) for _ in range(20)))


async def freeze(*workers: FreezingWorker) -> None:
    """They were heard for the last time before what is sent now."""
    for worker in workers:
        worker.freeze()
    await asyncio.sleep(0.01)


def corrected(house: VirtualGateway, worker: FreezingWorker) -> int:
    return sum(job.step_id != "probe" for plan in worker.plans for job in plan.jobs)


def test_overdue_calls_of_a_frozen_worker_are_answered_by_another_within_a_second() -> None:
    async def scenario() -> None:
        a, b = FreezingWorker("a"), FreezingWorker("b")
        async with a_virtual_gateway(a, b) as house:
            await warmed(house, 200)
            await freeze(a)
            began, before = house.clock.now(), corrected(house, a)
            streams = [house.submit() for _ in range(4)]
            ends = [end for _, end in await asyncio.gather(*map(read, streams))]
            assert all(isinstance(end, Done) for end in ends)
            assert house.clock.now() - began < 1.0
            retried = corrected(house, a) - before
            assert retried
            assert house.metric('inferry_hedged_retries_total{worker="a"}') == retried
            assert house.phase(a) is Phase.DRAINING, "it gets no more until it has confirmed"
            a.thaw()
            await house.until(lambda: house.phase(a) is Phase.READY)

    run_virtual(scenario())


def test_no_more_than_two_calls_in_a_hundred_are_retried_however_many_are_overdue() -> None:
    async def scenario() -> None:
        a, b = FreezingWorker("a"), FreezingWorker("b")
        async with a_virtual_gateway(a, b, failure_threshold=1000) as house:
            await warmed(house, 100)
            await freeze(a)
            before = corrected(house, a)
            streams = [house.submit() for _ in range(40)]
            await asyncio.sleep(20)
            assert corrected(house, a) - before > 10, "many wait there"
            assert house.metric('inferry_hedged_retries_total{worker="a"}') == int(140 * 0.02)
            a.thaw()
            await asyncio.gather(*map(read, streams))

    run_virtual(scenario())


def test_a_call_is_not_retried_where_there_is_no_other_worker() -> None:
    async def scenario() -> None:
        a = FreezingWorker("a")
        async with a_virtual_gateway(a, max_hedged_retry_ratio=1.0) as house:
            await warmed(house, 60)
            await freeze(a)
            stream = house.submit()
            await asyncio.sleep(20)
            assert stream.attempt.job.attempt == 1
            a.thaw()
            assert isinstance((await read(stream))[1], Done)

    run_virtual(scenario())


def test_a_call_is_not_retried_a_second_time() -> None:
    async def scenario() -> None:
        a, b = FreezingWorker("a"), FreezingWorker("b")
        async with a_virtual_gateway(a, b, max_hedged_retry_ratio=1.0, failure_threshold=1000) as house:
            await warmed(house, 60)
            await freeze(a, b)
            stream = house.submit()
            await asyncio.sleep(60)
            assert stream.attempt.job.attempt == 2
            a.thaw()
            b.thaw()
            assert isinstance((await read(stream))[1], Done)

    run_virtual(scenario())


def test_a_client_that_leaves_an_overdue_call_ends_it() -> None:
    async def scenario() -> None:
        a, b = FreezingWorker("a"), FreezingWorker("b")
        async with a_virtual_gateway(a, b, max_hedged_retry_ratio=1.0) as house:
            await warmed(house, 60)
            await freeze(a, b)
            stream = house.submit()
            await asyncio.sleep(0.2)
            house.gateway.cancel(stream.attempt.job.job_id)
            _, end = await asyncio.wait_for(read(stream), 30)
            assert isinstance(end, Failed)
            assert not isinstance(end.error, WorkerTimeout)
            assert stream.attempt.job.attempt == 1

    run_virtual(scenario())
