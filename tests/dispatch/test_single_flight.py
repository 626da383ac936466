"""Identical calls share one execution, and each client gets the answer that it would have got alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dispatch.single_flight_harness import FREE, a_gateway, text_of
from inferry.dispatch.singleflight.request_key import RequestKey, digest
from inferry.domain.callers import Caller
from inferry.domain.errors import (
    ClientClosed,
    RunBudgetExhausted,
    RunCancelled,
)
from inferry.domain.jobs import InferenceJob, RepeatPolicy, ResumePoint
from inferry.domain.lanes import Lane
from inferry.domain.ledger import Outcome
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.streams.mailbox import JobStream
from support.builders import a_job
from support.loop_helpers import read, run, run_pending

# -- identical calls -------------------------------------------------------------------------------------------------


def test_identical_deterministic_jobs_in_flight_are_one_execution_and_one_of_them_pays() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job(stream=True)
            streams = [harness.gateway.submit(first)]
            second = harness.same_call(first, stream=False)
            streams.append(harness.gateway.submit(second))
            await harness.worker.says(first, "one")
            await asyncio.sleep(1)  # the third comes after the execution was sent and has begun
            third = harness.same_call(first, lane=Lane.P2)
            streams.append(harness.gateway.submit(third))
            await harness.worker.says(first, " two")
            await harness.worker.ends(first)
            assert [await text_of(stream) for stream in streams] == ["one two"] * 3
            assert await harness.executions() == 1
            rows = harness.rows()
            assert (rows[first.job_id].shared_with, rows[first.job_id].output_tokens) == (None, 3)
            for follower in (second, third):
                row = rows[follower.job_id]
                assert row.outcome is Outcome.DONE
                assert row.shared_with == first.job_id
                assert (row.prompt_tokens, row.cached_tokens, row.output_tokens, row.gpu_seconds) == (0, 0, 0, 0.0)
                assert (row.cost_nanos, row.worker, row.finish) == (0, "puppet", "stop")
                assert row.queue_ms is not None
                assert row.first_token_ms is not None
                assert 0 <= row.queue_ms <= row.first_token_ms <= row.total_ms
            assert harness.metric('inferry_shared_jobs_total{kind="identical"}') == 2
            assert harness.metric('inferry_jobs_total{lane="P2",model="m",outcome="done"}') == 1
            assert harness.metric("inferry_jobs_in_flight") == 0

    run(scenario())


DIFFERENT: dict[str, Callable[[InferenceJob], InferenceJob]] = {
    "another tenant": lambda job: replace(job, tenant="b"),
    "another body": lambda job: replace(job, payload=replace(job.payload, body=b'{"x":1}')),
    "another prompt": lambda job: replace(job, prompt_hash="other"),
    "another api": lambda job: replace(job, payload=replace(job.payload, api="completions")),
    "another route": lambda job: replace(job, route=replace(job.route, avoid=("elsewhere",))),
    "a higher lane": lambda job: replace(job, lane=Lane.P0),
    "less patience": lambda job: replace(job, max_wait_s=0.0),
    "sampled": lambda job: replace(job, payload=replace(job.payload, sampling=FREE)),
    "asked to be fresh": lambda job: replace(job, repeat=RepeatPolicy("r s", fresh=True)),
    "asked to be fresh, without a name": lambda job: replace(job, repeat=RepeatPolicy(None, fresh=True)),
}


@pytest.mark.parametrize("how", DIFFERENT)
def test_a_job_that_differs_in_what_matters_is_not_shared(how: str) -> None:
    async def scenario() -> None:
        async with a_gateway(capacity=Capacity(sequences=1)) as harness:
            blocker = harness.job(tenant="c", body=b'{"first":1}')
            harness.gateway.submit(blocker)
            await run_pending()
            first = harness.job(max_wait_s=1.0)
            one = harness.gateway.submit(first)
            other = harness.gateway.submit(DIFFERENT[how](harness.same_call(first)))
            assert (one.shared_with, other.shared_with) == (None, None)
            assert harness.gateway.submit(harness.same_call(first)).shared_with is not None

    run(scenario())


@pytest.mark.parametrize("resumes_first", [True, False])
def test_a_job_that_resumes_shares_no_execution_because_it_begins_in_the_middle(resumes_first: bool) -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            whole = replace(harness.job(stream=True), repeat=RepeatPolicy("r s"))
            resumed = harness.same_call(whole, resume_point=ResumePoint((1, 2), (0,)))
            jobs = [resumed, whole] if resumes_first else [whole, resumed]
            streams = {job.job_id: harness.gateway.submit(job) for job in jobs}
            await harness.worker.says(whole, "one", " two")
            await harness.worker.ends(whole)
            await harness.worker.says(resumed, " two")
            await harness.worker.ends(resumed)
            assert await text_of(streams[whole.job_id]) == "one two"
            assert await text_of(streams[resumed.job_id]) == " two"
            assert await harness.executions() == 2

    run(scenario())


def test_sampled_jobs_are_shared_only_with_the_same_seed() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            seeded = replace(FREE, seed=7)
            first = harness.job(seeded)
            harness.gateway.submit(first)
            assert harness.gateway.submit(harness.job(seeded)).shared_with == first.job_id
            assert harness.gateway.submit(harness.job(replace(FREE, seed=8))).shared_with is None
            assert harness.gateway.submit(harness.job(FREE)).shared_with is None
            assert type(harness.gateway.submit(harness.job(FREE))) is JobStream, "it costs nothing where it cannot be"

    run(scenario())


def test_sharing_of_identical_jobs_can_be_switched_off() -> None:
    async def scenario() -> None:
        async with a_gateway(identical=False) as harness:
            streams = [harness.gateway.submit(harness.job()) for _ in range(2)]
            assert [type(stream) for stream in streams] == [JobStream, JobStream]

    run(scenario())


def bodies(*fields: dict[str, Any]) -> tuple[InferenceJob, ...]:
    base = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    return tuple(a_job(body=msgspec.json.encode(base | more)) for more in fields)


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream_options": None},
        {"user": "u", "metadata": {"k": "v"}, "service_tier": "flex", "prompt_cache_key": "p"},
    ],
)
def test_fields_without_effect_on_the_output_do_not_prevent_sharing(more: dict[str, Any]) -> None:
    one, other = bodies({}, more)
    assert RequestKey(one).matches(other)
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    "more",
    [
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"max_tokens": 5},
        {"n": 2},
        {"logprobs": True},
        {"temperature": 0.0},
        {"messages": [{"role": "user", "content": "ho"}]},
    ],
)
def test_every_other_field_of_a_body_prevents_sharing(more: dict[str, Any]) -> None:
    one, other = bodies({}, more)
    assert not RequestKey(one).matches(other)
    assert digest(one) != digest(other)


def test_another_predicted_length_does_not_make_a_call_another_but_another_precision_does() -> None:
    short, long = a_job("1", length="short"), a_job("2", length="long")
    assert RequestKey(short).matches(long)
    assert not RequestKey(short).matches(a_job("3", length="short", precision="fp8"))


# -- leaving ---------------------------------------------------------------------------------------------------------


def test_an_execution_is_cancelled_when_its_last_subscriber_leaves() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job()
            harness.gateway.submit(first)
            second, third = harness.same_call(first), harness.same_call(first)
            streams = [harness.gateway.submit(second), harness.gateway.submit(third)]
            await harness.worker.says(first, "one")
            harness.gateway.cancel(first.job_id)
            harness.gateway.cancel(second.job_id)
            harness.gateway.cancel(second.job_id)
            await harness.worker.says(first, " two")
            assert harness.worker.cancelled == []
            _, end = await read(streams[0])
            assert isinstance(end, Failed)
            assert isinstance(end.error, ClientClosed)
            harness.gateway.cancel(third.job_id)
            await run_pending()
            assert harness.worker.cancelled == [first.job_id]
            assert harness.gateway.submit(harness.same_call(first)).shared_with is None, (
                "nobody joins what is being cancelled"
            )
            assert {harness.rows()[job.job_id].outcome for job in (first, second, third)} == {Outcome.CANCELLED}

    run(scenario())


def test_a_disconnect_of_the_only_subscriber_cancels_at_once() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            job = replace(harness.job(), repeat=RepeatPolicy("r s", keep=True))
            stream = harness.gateway.submit(job)
            await harness.worker.says(job, "one")
            harness.gateway.cancel(job.job_id)
            _, end = await read(stream)
            assert isinstance(end, Failed)
            await run_pending()
            assert harness.worker.cancelled == [job.job_id]

    run(scenario())


def test_a_cancelled_run_leaves_subscribers_of_other_runs() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job(run_id="cancelled")
            own = harness.gateway.submit(first)
            other = harness.gateway.submit(harness.same_call(first, run_id="other"))
            await harness.worker.says(first, "one")
            harness.gateway.cancel(first.job_id, RunCancelled("it was"))
            _, end = await read(own)
            assert isinstance(end, Failed)
            assert isinstance(end.error, RunCancelled)
            harness.gateway.cancel(first.job_id, RunCancelled("it was"))
            await harness.worker.ends(first)
            assert await text_of(other) == "one"

    run(scenario())


def test_a_cancelled_run_ends_executions_shared_within_it() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job(run_id="cancelled")
            sub = harness.same_call(first, run_id="sub", parent_run="cancelled")
            streams = [harness.gateway.submit(job) for job in (first, sub, harness.same_call(first))]
            await harness.worker.says(first, "one")
            report = await harness.gateway.cancel_run("a", "cancelled")
            assert (report.running, report.freed, report.unconfirmed) == (1, 1, 0)
            for stream in streams:
                _, end = await read(stream)
                assert isinstance(end, Failed)
                assert isinstance(end.error, RunCancelled)
            assert harness.worker.cancelled == [first.job_id]
            assert {row.error_code for row in harness.rows().values()} == {"run_cancelled"}
            assert harness.gateway.in_flight == 0

    run(scenario())


def test_a_second_cancel_of_a_run_whose_execution_continues_for_another_reports_nothing() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job(run_id="cancelled")
            own = harness.gateway.submit(first)
            other = harness.gateway.submit(harness.same_call(first, run_id="other"))
            await harness.worker.says(first, "one")
            reports = [await harness.gateway.cancel_run("a", "cancelled") for _ in range(3)]
            assert [(one.queued, one.running, one.unconfirmed) for one in reports] == [(1, 0, 0), (0, 0, 0), (0, 0, 0)]
            assert isinstance((await read(own))[1], Failed)
            await harness.worker.ends(first)
            assert await text_of(other) == "one"

    run(scenario())


def test_a_cancel_that_ends_the_last_reader_reports_the_execution_though_its_leader_has_left() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job(run_id="cancelled")
            harness.gateway.submit(first)
            follower = harness.gateway.submit(harness.same_call(first, run_id="sub", parent_run="cancelled"))
            await harness.worker.says(first, "one")
            harness.gateway.cancel(first.job_id)
            report = await harness.gateway.cancel_run("a", "cancelled")
            assert (report.queued, report.running, report.freed) == (1, 1, 1)
            assert isinstance((await read(follower))[1], Failed)

    run(scenario())


def test_a_run_with_an_exhausted_budget_may_join_a_shared_execution() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            caller = Caller(Tenant(name="a", limits=Limits(run_token_ceiling=60)))
            kept = replace(harness.job(tokens=50, output=10), token_budget=10, repeat=RepeatPolicy("r s", keep=True))
            harness.gateway.submit(kept, caller)
            await harness.worker.says(kept, "one")
            await harness.worker.ends(kept, Done(kept.job_id, FinishReason.LENGTH, Usage(50, 0, 10)))
            with pytest.raises(RunBudgetExhausted):
                harness.gateway.submit(harness.same_call(kept, repeat=None), caller)
            assert await text_of(harness.gateway.submit(harness.same_call(kept), caller)) == "one"

    run(scenario())
