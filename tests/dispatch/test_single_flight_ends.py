"""Single flight: ends that belong to the leader only, deadlines, lost workers and quotas of subscribers."""

import asyncio

import pytest

from dispatch.single_flight_harness import a_gateway, text_of
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.errors import (
    NoWorker,
    QueueTimeout,
    RateLimited,
    RunBudgetExhausted,
    WorkerLost,
)
from inferry.domain.jobs import ResumeMode
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from support.loop_helpers import read, run, run_pending

# -- ends that are the leader's own ----------------------------------------------------------------------------------


def test_non_streaming_followers_of_a_job_with_an_exhausted_budget_execute_again() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job()
            leading = harness.gateway.submit(first)
            whole, also, streaming = (harness.same_call(first, stream=stream) for stream in (False, False, True))
            streams = [harness.gateway.submit(job) for job in (whole, also, streaming)]
            await harness.worker.says(first, "cut")
            usage, stopped = Usage(50, 0, 1), RunBudgetExhausted("used up")
            await harness.worker.ends(first, Done(first.job_id, FinishReason.LENGTH, usage, stopped=stopped))
            assert await text_of(leading) == "cut"
            assert await text_of(streams[2]) == "cut", "what has been seen cannot be taken back"
            assert (streams[0].shared_with, streams[1].shared_with) == (None, whole.job_id)
            assert streams[0].restarts == 1
            await harness.worker.says(whole, "one", " two")
            await harness.worker.ends(whole)
            for stream in streams[:2]:
                assert (await text_of(stream)).endswith("one two")
            assert await harness.executions() == 2
            assert harness.rows()[whole.job_id].shared_with is None
            assert harness.metric("inferry_jobs_in_flight") == 0

    run(scenario())


@pytest.mark.plain
def test_a_follower_that_may_not_execute_gets_the_capped_response() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job()
            harness.gateway.submit(first)
            follower = harness.same_call(first)
            stream = harness.gateway.submit(follower)
            await harness.worker.says(first, "cut")
            harness.gateway._pool.serves = lambda model: False  # type: ignore[method-assign]
            stopped = RunBudgetExhausted("used up")
            end = Done(first.job_id, FinishReason.LENGTH, Usage(50, 0, 1), stopped=stopped)
            await harness.worker.ends(first, end)
            assert await text_of(stream) == "cut"
            assert harness.rows()[follower.job_id].shared_with == first.job_id
            assert harness.metric("inferry_jobs_in_flight") == 0

    run(scenario())


def test_each_subscriber_keeps_its_own_deadline() -> None:
    async def scenario() -> None:
        async with a_gateway(capacity=Capacity(sequences=1)) as harness:
            blocker = harness.job(body=b'{"first":1}')
            harness.gateway.submit(blocker)
            await run_pending()
            now = harness.clock.now()
            first = harness.job(deadline=now + 0.1)
            leading = harness.gateway.submit(first)
            hasty = harness.gateway.submit(harness.same_call(first, deadline=now + 0.05))
            patient = harness.gateway.submit(harness.same_call(first, deadline=None))
            assert hasty.shared_with == patient.shared_with == first.job_id
            for stream in (hasty, leading):
                _, end = await read(stream)
                assert isinstance(end, Failed)
                assert isinstance(end.error, QueueTimeout)
            assert patient.shared_with is None, "it waits on, for itself"
            await harness.worker.ends(blocker)
            job = patient.attempt.job
            await harness.worker.says(job, "one")
            await harness.worker.ends(job)
            assert await text_of(patient) == "one"

    run(scenario())


def test_a_lost_worker_restarts_whole_responses_and_fails_streams() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = replace(harness.job(), resume=ResumeMode.RESTART)
            leading = harness.gateway.submit(first)
            streaming = harness.gateway.submit(harness.same_call(first, stream=True))
            await harness.worker.says(first, "void")
            await harness.worker.ends(first, Failed(first.job_id, WorkerLost("gone")))
            harness.worker.lines.clear()
            for _ in range(200):
                if await harness.executions() == 2:
                    break
                await asyncio.sleep(0.01)
            await harness.worker.says(first, "one")
            await harness.worker.ends(first)
            deltas, end = await read(streaming)
            assert isinstance(end, Failed)
            assert (deltas[0].text, end.error.code) == ("void", "worker_lost")
            assert (await text_of(leading), leading.restarts) == ("one", 1)

    run(scenario())


# -- quotas ----------------------------------------------------------------------------------------------------------


def test_a_follower_takes_a_request_of_its_quota_and_no_tokens() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            limits = Limits(requests_per_minute=2, tokens_per_minute=100)
            caller = Caller(Tenant(name="a", limits=limits))
            first = harness.job(tokens=40, output=10)
            leading = harness.gateway.submit(first, caller)
            follower = harness.gateway.submit(harness.same_call(first), caller)
            with pytest.raises(RateLimited):
                harness.gateway.submit(harness.same_call(first), caller)
            await harness.worker.says(first, "one")
            await harness.worker.ends(first)
            assert await text_of(leading) == await text_of(follower) == "one"

    run(scenario())


def test_a_response_capped_by_a_budget_is_not_shared() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            poor = Caller(Tenant(name="a", limits=Limits(run_token_ceiling=60)))
            first = replace(harness.job(tokens=40, output=100, run_id="poor"), token_budget=100)
            leading = harness.gateway.submit(first, poor)
            assert leading.attempt.job.payload.output_cap is not None
            assert harness.gateway.submit(harness.same_call(first, run_id="rich"), ANONYMOUS).shared_with is None

    run(scenario())


def test_a_refused_leader_leaves_no_execution() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            with pytest.raises(NoWorker):
                harness.gateway.submit(harness.job(model="nobody's"))
            assert len(harness.gateway._single_flight) == 0

    run(scenario())
