"""Calls that are the same share one execution, and nobody is worse off for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.deadlines import Deadlines
from inferry.dispatch.pool import Pool
from inferry.dispatch.singleflight.request_key import RequestKey, digest
from inferry.dispatch.singleflight.single_flight import SingleFlight
from inferry.dispatch.values import Sharing
from inferry.domain.attempts import Attempt
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.clock import SystemClock
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    NoWorker,
    QueueTimeout,
    RateLimited,
    RunBudgetExhausted,
    RunCancelled,
    WorkerLost,
)
from inferry.domain.jobs import InferenceJob, RepeatPolicy, ResumeMode
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.ports import Emit
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Usage
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.streams.demux import Demux
from inferry.streams.mailbox import JobStream
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run, run_pending
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock

GREEDY = Sampling(temperature=0.0, max_tokens=10)
FREE = Sampling(temperature=1.0, max_tokens=10)


class ControlledWorker(ScriptedWorker):
    """Says what the test tells it to say, when it is told."""

    def __init__(self, **more: Any) -> None:
        super().__init__("puppet", **more)
        self.lines: dict[str, asyncio.Queue[str | End]] = {}

    async def _generate(self, job: InferenceJob, emit: Emit) -> None:
        if job.step_id == "probe":
            await super()._generate(job, emit)
            return
        said = 0
        lines = self.lines.setdefault(job.job_id, asyncio.Queue())
        try:
            while isinstance(line := await lines.get(), str):
                emit(Delta(job.job_id, job.run_id, job.step_id, said, line, (said,), 1))
                said += 1
            emit(line)
        except asyncio.CancelledError:
            emit(Failed(job.job_id, ClientClosed("cancelled"), Usage(output_tokens=said)))
        finally:
            self._running.pop(job.job_id, None)

    async def says(self, job: InferenceJob, *lines: str) -> None:
        for line in lines:
            self.lines.setdefault(job.job_id, asyncio.Queue()).put_nowait(line)
        await run_pending()

    async def ends(self, job: InferenceJob, end: End | None = None) -> None:
        usage = Usage(50, 0, 3, 0.5)
        done = Done(job.job_id, FinishReason.STOP, usage) if end is None else end
        self.lines.setdefault(job.job_id, asyncio.Queue()).put_nowait(done)
        await run_pending()


class GatewayHarness:
    """A gateway whose worker is a puppet, and the ledger it writes."""

    def __init__(self, single_flight: Sharing, capacity: Capacity | None) -> None:
        self.worker = ControlledWorker(capacity=capacity)
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.clock = LoopClock()
        self.metrics = Metrics(["m"], ["puppet"])
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=Pool([self.worker], self.clock),
            recorder=self.recorder,
            metrics=self.metrics,
            clock=self.clock,
            sharing=single_flight,
        )

    def job(self, sampling: Sampling = GREEDY, **fields: Any) -> InferenceJob:
        return a_job(at=self.clock.now(), sampling=sampling, **fields)

    def same_call(self, job: InferenceJob, **changes: Any) -> InferenceJob:
        """The same call from another client."""
        other = a_job(tenant=job.tenant)
        changes = {"job_id": other.job_id, "arrived_at": self.clock.now()} | changes
        return replace(job, **changes)

    async def executions(self) -> int:
        await run_pending()
        return sum(len(plan.jobs) for plan in self.worker.plans)

    def rows(self) -> dict[str, LedgerEntry]:
        self.recorder.flush(120)
        return {entry.job_id: entry for entry in self.ledger.entries}

    def metric(self, line: str) -> float:
        found = [one for one in self.metrics.render()[0].decode().splitlines() if one.startswith(line)]
        assert len(found) == 1, (line, found)
        return float(found[0].rpartition(" ")[2])


@asynccontextmanager
async def a_gateway(capacity: Capacity | None = None, **single_flight: Any) -> AsyncIterator[GatewayHarness]:
    harness = GatewayHarness(Sharing(**single_flight), capacity)
    harness.gateway.start()
    while not harness.gateway.is_ready:
        await asyncio.sleep(0)
    try:
        yield harness
        assert harness.gateway._single_flight._history_budget.used == 0 or len(harness.gateway._single_flight), (
            "nothing is kept for nobody"
        )
    finally:
        await harness.gateway.close()


async def text_of(stream: JobStream) -> str:
    deltas, end = await read(stream)
    assert isinstance(end, Done), end
    return "".join(delta.text for delta in deltas)


# -- identical calls -------------------------------------------------------------------------------------------------


def test_identical_deterministic_jobs_in_flight_are_one_execution_and_one_of_them_pays() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            first = harness.job(stream=True)
            streams = [harness.gateway.submit(first)]
            second = harness.same_call(first, stream=False)
            streams.append(harness.gateway.submit(second))
            await harness.worker.says(first, "one")
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
def test_what_does_not_change_the_tokens_does_not_make_a_call_another(more: dict[str, Any]) -> None:
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
def test_whatever_else_is_in_a_body_does(more: dict[str, Any]) -> None:
    one, other = bodies({}, more)
    assert not RequestKey(one).matches(other)
    assert digest(one) != digest(other)


# -- leaving ---------------------------------------------------------------------------------------------------------


def test_an_execution_goes_on_when_its_first_reader_leaves_and_is_cancelled_with_its_last() -> None:
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


def test_a_client_that_leaves_alone_cancels_at_once() -> None:
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


def test_a_cancelled_run_takes_its_readers_and_leaves_those_of_others() -> None:
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


def test_a_cancelled_run_that_shares_with_itself_is_gone_whole() -> None:
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


def test_what_costs_nothing_is_there_for_a_run_that_has_used_up_its_budget() -> None:
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


# -- ends that are the leader's own ----------------------------------------------------------------------------------


def test_followers_of_a_job_whose_budget_ended_run_again_where_they_can() -> None:
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
def test_a_follower_that_is_refused_an_execution_of_its_own_gets_what_there_is() -> None:
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


def test_deadlines_hold_for_each_of_those_who_share() -> None:
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


def test_a_worker_that_is_lost_is_lost_for_all_and_who_streams_is_told() -> None:
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


# -- the same call again ---------------------------------------------------------------------------------------------


def test_the_same_step_with_an_equal_body_joins_whatever_its_temperature() -> None:
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


def test_a_call_that_lingers_is_there_for_the_retry() -> None:
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


def test_a_call_does_not_linger_for_ever() -> None:
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


def test_a_lingering_call_that_ends_is_there_for_the_retry_too() -> None:
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


def test_an_answer_that_was_to_be_kept_is_given_again_at_no_cost() -> None:
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


def test_an_answer_is_kept_for_as_long_as_it_says_and_only_where_asked() -> None:
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


def test_an_answer_that_a_budget_cuts_short_is_nobody_elses() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            poor = Caller(Tenant(name="a", limits=Limits(run_token_ceiling=60)))
            first = replace(harness.job(tokens=40, output=100, run_id="poor"), token_budget=100)
            leading = harness.gateway.submit(first, poor)
            assert leading.attempt.job.payload.output_cap is not None
            assert harness.gateway.submit(harness.same_call(first, run_id="rich"), ANONYMOUS).shared_with is None

    run(scenario())


# -- any order -------------------------------------------------------------------------------------------------------


class Stage:
    """The least that sharing needs of a gateway: streams that the test fills itself."""

    def __init__(self) -> None:
        self.demux = Demux()
        self.flights = SingleFlight(Sharing(), self, SystemClock(), Deadlines(None, SystemClock().now))
        self.cancelled: list[str] = []
        self.accounts: list[str] = []
        self.tickets = 0
        self.next = 0

    def execute(self, job: InferenceJob, caller: Caller) -> JobStream:
        self.next = 0
        return self.demux.open(Attempt(job))

    def cancel_execution(self, job_id: str, error: GatewayError | None) -> None:
        self.cancelled.append(job_id)

    def admit_follower(self, job: InferenceJob, caller: Caller) -> "Stage":
        self.tickets += 1
        return self

    def ended(self, attempt: Attempt) -> None:
        self.tickets -= 1

    def withdraw(self) -> None:
        self.tickets -= 1

    def follower_ended(self, entry: LedgerEntry) -> None:
        self.accounts.append(entry.job_id)

    def shared(self, kind: str) -> None: ...

    def unshared(self) -> None: ...


ACTS = st.one_of(
    st.tuples(st.just("arrives"), st.booleans()),
    st.tuples(st.just("leaves"), st.integers(0, 6)),
    st.tuples(st.just("says"), st.just(0)),
    st.tuples(st.just("is lost"), st.booleans()),
    st.tuples(st.just("is cut short"), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(acts=st.lists(ACTS, max_size=30))
def test_whatever_the_order_everybody_who_stays_has_the_answer_and_what_nobody_wants_is_cancelled(
    acts: list[tuple[str, int]],
) -> None:
    async def scenario() -> None:
        stage = Stage()
        said: dict[str, list[str]] = {}  # by execution
        present: dict[str, Any] = {}
        heard: dict[str, tuple[int, str]] = {}
        ends: dict[str, End] = {}
        torn: set[str] = set()

        def listens(reader: Any) -> None:
            job_id = reader.job.job_id

            def on_news() -> None:
                delta, end = reader.take_nowait()
                restarts, text = heard.get(job_id, (0, ""))
                if reader.restarts != restarts:
                    assert not reader.job.stream
                    restarts, text = reader.restarts, ""
                heard[job_id] = restarts, text + ("" if delta is None else delta.text)
                if end is not None:
                    assert job_id not in ends, "one end each"
                    ends[job_id] = end

            reader.listen(on_news)

        def running() -> JobStream | None:
            ids = stage.demux.job_ids()
            return stage.demux.get(ids[0]) if ids else None

        def over(end: Callable[[str], End]) -> None:
            stream = running()
            if stream is not None:
                job_id = stream.attempt.job.job_id
                stage.demux.close(stream, end(job_id))

        for act, value in acts:
            stream = running()
            leader = None if stream is None else stream.attempt.job.job_id
            if act == "arrives":
                job = a_job(sampling=GREEDY, stream=bool(value))
                reader = stage.flights.submit(job, ANONYMOUS)
                present[job.job_id] = reader
                listens(reader)
                said.setdefault(job.job_id, [])
                assert len(stage.demux) == 1
            elif act == "leaves" and value < len(present):
                job_id = list(present)[value]
                stage.flights.cancel(job_id, None)
                del present[job_id]
            elif stream is None or leader is None:
                continue
            elif act == "says":
                job = stream.attempt.job
                said[leader].append(f"{len(said[leader])} ")
                stream.push(Delta(leader, job.run_id, job.step_id, stage.next, said[leader][-1], (), 1))
                stage.next += 1
            elif act == "is lost" and (value or not said[leader]) and not stream.attempt.job.stream:
                # Who streams and has heard a part of what is void is told so, as soon as there is news.
                torn |= {job_id for job_id, one in present.items() if one.job.stream and said[leader]}
                stream.begin_attempt(Attempt(stream.attempt.job), from_start=True)
                stage.next, said[leader] = 0, []
            elif act == "is cut short":
                over(lambda job_id: Done(job_id, FinishReason.LENGTH, Usage(), stopped=RunBudgetExhausted("used up")))
            for job_id in [job_id for job_id in present if job_id in ends]:
                del present[job_id]
            await asyncio.sleep(0)
            stream = running()
            if stream is not None:
                leader = stream.attempt.job.job_id
                wanted = [reader for reader in present.values() if reader.attempt.job.job_id == leader]
                assert (leader in stage.cancelled) == (not wanted)
                if not wanted:
                    over(lambda job_id: Failed(job_id, ClientClosed("cancelled")))
        stream = running()
        leader = "" if stream is None else stream.attempt.job.job_id
        over(lambda job_id: Done(job_id, FinishReason.STOP, Usage()))
        for job_id in present:
            end = ends[job_id]
            assert isinstance(end, Failed) == (job_id in torn)
            assert job_id in torn or heard[job_id][1] == "".join(said[leader])
        assert (stage.tickets, len(stage.demux), len(stage.flights), stage.flights.bytes_held) == (0, 0, 0, 0)
        assert not stage.flights._subscribers
        assert not stage.flights._executions._by_prompt
        assert len(stage.accounts) == len(set(stage.accounts))

    asyncio.run(scenario())


def test_what_is_not_served_is_refused_to_leaders_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            with pytest.raises(NoWorker):
                harness.gateway.submit(harness.job(model="nobody's"))
            assert len(harness.gateway._single_flight) == 0

    run(scenario())
