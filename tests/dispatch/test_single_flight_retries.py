"""Single flight: retries join the running call, lingering calls and replayed responses."""

import asyncio

import pytest

from dispatch.single_flight_harness import FREE, a_gateway, text_of
from inferry.domain.errors import (
    RunCancelled,
)
from inferry.domain.jobs import RepeatPolicy
from inferry.domain.lanes import Lane
from inferry.domain.ledger import Outcome
from inferry.domain.streams import Done
from inferry.domain.values import replace
from support.loop_helpers import read, run, run_pending

# -- the same call again ---------------------------------------------------------------------------------------------


def test_a_retry_of_a_step_with_an_equal_body_joins_at_any_temperature() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = replace(harness.job(FREE, run_id="r", step_id="s"), repeat=RepeatPolicy("r s"))
            leading = harness.gateway.submit(first)
            await harness.worker.says(first, "one")
            retry = harness.gateway.submit(harness.same_call(first, lane=Lane.P0))
            other_body = replace(first.payload, body=b'{"other":1}')
            reused = harness.gateway.submit(harness.same_call(first, payload=other_body))
            other_step = harness.gateway.submit(harness.same_call(first, repeat=RepeatPolicy("r t")))
            other_tenant = harness.gateway.submit(harness.same_call(first, tenant="b"))
            assert retry.shared_with == first.job_id
            assert {stream.shared_with for stream in (reused, other_step, other_tenant)} == {None}
            await harness.worker.ends(first)
            assert await text_of(leading) == await text_of(retry) == "one"
            assert harness.metric('inferry_shared_jobs_total{kind="joined"}') == 1

    run(scenario())


def test_a_retry_joins_a_lingering_call() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = replace(harness.job(FREE), repeat=RepeatPolicy("r s", linger_s=20.0))
            harness.gateway.submit(first)
            await harness.worker.says(first, "one")
            harness.gateway.cancel(first.job_id)
            await harness.worker.says(first, " two")
            retry = harness.gateway.submit(harness.same_call(first))
            await harness.worker.says(first, " three")
            await harness.worker.ends(first)
            assert (retry.shared_with, await text_of(retry)) == (first.job_id, "one two three")

    run(scenario())


def test_a_job_that_comes_back_while_its_call_lingers_leads_it_again() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            job = replace(harness.job(FREE), repeat=RepeatPolicy("r s", linger_s=20.0))
            harness.gateway.submit(job)
            await harness.worker.says(job, "one")
            harness.gateway.cancel(job.job_id)
            again = harness.gateway.submit(job)
            await harness.worker.says(job, " two")
            await harness.worker.ends(job)
            assert (again.shared_with, await text_of(again)) == (None, "one two")
            assert harness.rows()[job.job_id].outcome is Outcome.DONE
            assert not harness.gateway._single_flight._subscribers

    run(scenario())


def test_a_job_that_has_a_reader_is_not_submitted_again() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            job = replace(harness.job(FREE), repeat=RepeatPolicy("r s"))
            stream = harness.gateway.submit(job)
            with pytest.raises(ValueError, match="in flight already"):
                harness.gateway.submit(job)
            await harness.worker.says(job, "one")
            await harness.worker.ends(job)
            assert await text_of(stream) == "one"

    run(scenario())


def test_a_lingering_call_is_cancelled_after_its_linger_time() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = replace(harness.job(FREE), repeat=RepeatPolicy("r s", linger_s=0.02))
            harness.gateway.submit(first)
            await harness.worker.says(first, "one")
            harness.gateway.cancel(first.job_id)
            while not harness.worker.cancelled:
                await asyncio.sleep(0.005)
            assert harness.rows()[first.job_id].outcome is Outcome.CANCELLED

    run(scenario())


def test_a_retry_gets_the_response_of_a_lingering_call_that_has_ended() -> None:
    async def scenario() -> None:
        async with a_gateway(linger_s=20.0) as harness:
            first = replace(harness.job(FREE), repeat=RepeatPolicy("r s"))
            harness.gateway.submit(first)
            await harness.worker.says(first, "one")
            harness.gateway.cancel(first.job_id)
            await harness.worker.ends(first)
            retry = harness.gateway.submit(harness.same_call(first))
            assert (retry.is_replay, await text_of(retry)) == (True, "one")

    run(scenario())


def test_a_run_that_is_cancelled_does_not_linger() -> None:
    async def scenario() -> None:
        async with a_gateway(linger_s=20.0) as harness:
            first = replace(harness.job(FREE), repeat=RepeatPolicy("r s"))
            harness.gateway.submit(first)
            await harness.worker.says(first, "one")
            harness.gateway.cancel(first.job_id)
            harness.gateway.cancel(first.job_id, RunCancelled("it was"))
            await run_pending()
            assert harness.worker.cancelled == [first.job_id]

    run(scenario())


def test_a_cached_response_is_replayed_at_no_cost() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = replace(harness.job(FREE), repeat=RepeatPolicy("r s", keep=True))
            harness.gateway.submit(first)
            await harness.worker.says(first, "one", " two")
            await harness.worker.ends(first)
            retry = harness.same_call(first, repeat=RepeatPolicy("r s"), stream=True)
            stream = harness.gateway.submit(retry)
            deltas, end = await read(stream)
            assert [delta.text for delta in deltas] == ["one two"]
            assert isinstance(end, Done)
            assert (stream.is_replay, stream.shared_with, end.usage.output_tokens) == (True, first.job_id, 3)
            other_body = replace(first.payload, body=b'{"other":1}')
            for other in (
                harness.same_call(first, repeat=RepeatPolicy("r s", fresh=True)),
                harness.same_call(first, payload=other_body),
                harness.same_call(first, tenant="b"),
                harness.same_call(first, repeat=RepeatPolicy("r t")),
            ):
                assert harness.gateway.submit(other).shared_with is None
            row = harness.rows()[retry.job_id]
            assert (row.shared_with, row.output_tokens, row.cost_nanos, row.outcome) == (
                first.job_id,
                0,
                0,
                Outcome.DONE,
            )
            assert row.worker is None
            assert harness.metric('inferry_shared_jobs_total{kind="replayed"}') == 1

    run(scenario())


def test_a_response_is_cached_only_on_request_and_until_its_ttl() -> None:
    async def scenario() -> None:
        async with a_gateway(replay_ttl_s=0.2) as harness:
            for keep in (False, True):
                job = replace(harness.job(FREE), repeat=RepeatPolicy("r s", keep=keep))
                harness.gateway.submit(job)
                await harness.worker.says(job, "one")
                await harness.worker.ends(job)
                assert harness.gateway._single_flight.bytes_held == 0 or keep
            assert harness.gateway.submit(harness.same_call(job)).is_replay
            while harness.gateway._single_flight.bytes_held:
                await asyncio.sleep(0.02)
            assert not harness.gateway.submit(harness.same_call(job)).is_replay

    run(scenario())
