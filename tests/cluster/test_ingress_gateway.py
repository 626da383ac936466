"""The gateway of an ingress process before an owner, in one process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from inferry.admission.open_gate import OpenGate
from inferry.cli.cluster_wiring import NoLedger, RemoteWorkers, build_ingress, follow_rate_limits
from inferry.cli.config.loader import parse
from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.values import Sharing
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.clock import SystemClock
from inferry.domain.errors import GatewayError, WorkerLost
from inferry.domain.jobs import Estimate, InferenceJob, ResumeMode, ResumePoint
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.run_split import RunSplit
from inferry.domain.streams import Delta, Done, End, Failed, Usage
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.scheduling.lane_switch import LaneTrial
from inferry.streams.mailbox import JobStream
from inferry.workers.remote.owner_link import OwnerAddress, OwnerLink
from support.builders import a_job
from support.owner import RunningOwner, running_owner
from support.scripted_worker import ScriptedWorker
from support.waiting import async_until

WORDS = [f" w{number}" for number in range(40)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


class Losing(ScriptedWorker):
    """Loses the first call after `dies_after` words, or after `written_at_once` of one turn of the event loop."""

    written_at_once = 0

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        job, written = plan.jobs[0], self.written_at_once
        if written and job.step_id != "probe" and job.resume_point is None:
            for index in range(written):
                emit(Delta(job.job_id, job.run_id, job.step_id, index, WORDS[index], (index,), 1))
            point = ResumePoint((1, 2, 3), tuple(range(written)))
            emit(Failed(job.job_id, WorkerLost("the script said so"), Usage(output_tokens=written), point))
            return
        await super().run(plan, emit)
        if plan.plan_id:
            self.dies_after = None


@asynccontextmanager
async def ingress(
    tmp_path: Path, tenants: dict[str, Tenant] | None = None, on_catalog: Callable[[Gateway], None] = lambda _: None
) -> AsyncIterator[tuple[Gateway, RunningOwner, Losing]]:
    """`on_catalog` is called as soon as the models are known."""
    path, clock = tmp_path / "owner.sock", SystemClock()
    worker = Losing(words=WORDS, can_resume=True, capacity=Capacity(sequences=8))
    async with running_owner([worker], path, tenants) as owner:
        pool, gate = Pool((), clock), OpenGate()
        gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=pool,
            recorder=Recorder(NoLedger()),
            metrics=Metrics((), ()),
            clock=clock,
            gate=gate,
            sharing=Sharing(identical=False, repeats=False),
        )
        link = OwnerLink(OwnerAddress(path), clock)
        follow_rate_limits(link, gate)
        RemoteWorkers(pool, clock).use(link)
        follow = link.on_change

        def on_change() -> None:
            follow()
            if gateway.models.cards():
                on_catalog(gateway)

        link.on_change = on_change
        link.start()
        gateway.start()
        await async_until(lambda: gateway.is_ready)
        try:
            yield gateway, owner, worker
        finally:
            await gateway.close()
            await link.close()


def a_call(gateway: Gateway, *, stream: bool = True, resume: ResumeMode = ResumeMode.CONTINUE) -> InferenceJob:
    job = a_job(at=gateway.now(), output=len(WORDS))
    return replace(job, stream=stream, resume=resume, payload=replace(job.payload, prompt_ids=(1, 2, 3)))


async def _answer(gateway: Gateway, job: InferenceJob) -> tuple[str, list[int], End, int]:
    """Text, indexes of the pieces, the end, and how often earlier text was void."""
    return await _read(gateway.submit(job))


async def _read(stream: JobStream) -> tuple[str, list[int], End, int]:
    text, restarts = "", 0
    indexes: list[int] = []
    end: End | None = None
    while end is None:
        delta, end = await stream.take()
        if stream.restarts != restarts:
            text, indexes, restarts = "", [], stream.restarts
        if delta is not None:
            text += delta.text
            indexes.append(delta.index)
    return text, indexes, end, restarts


def test_an_ingress_reads_calls_with_the_lanes_that_the_owner_applies(tmp_path: Path) -> None:
    def with_p1(**fields: Any) -> dict[Lane, LanePolicy]:
        return {**DEFAULT_LANES, Lane.P1: structs.replace(DEFAULT_LANES[Lane.P1], **fields)}

    async def scenario() -> None:
        path = tmp_path / "owner.sock"
        async with running_owner([ScriptedWorker()], path) as owner:
            link = OwnerLink(OwnerAddress(path), SystemClock())
            service = build_ingress(parse({"ledger": f"sqlite:///{tmp_path / 'ledger.db'}"}), link, {})
            service.start()
            link.start()
            try:
                lanes = with_p1()

                def resolved() -> tuple[float, float, str | None]:
                    call = service.gateway.models.resolve(
                        ANONYMOUS, ModelCard(name="m"), Lane.P1, Estimate.exactly(2000),
                        max_wait_ms=None, ttft_ms_per_1k=None, body=b"{}", budget=600, ignore_eos=True,
                    )  # fmt: skip
                    return call.max_wait_s, call.ttft_allowance_s, call.route.length

                assert resolved() == (0.12, 0.0, None)
                owner.gateway.use_lanes(lanes, 1)
                await link.wait_connected()
                lanes.update(with_p1(max_wait_ms=300, ttft_ms_per_1k_tokens=40, long_output_tokens=500))
                owner.gateway.use_lanes(lanes, 2)
                await async_until(lambda: resolved() == (0.3, 0.08, "long"))
                owner.gateway.use_lanes(lanes, 2, LaneTrial(with_p1(max_wait_ms=900), 3, RunSplit("salt", 0.5)))
                await async_until(lambda: resolved() == (0.9, 0.08, "long"))
                owner.gateway.use_lanes(DEFAULT_LANES, 4)
                await async_until(lambda: resolved() == (0.12, 0.0, None))
            finally:
                await service.close()

    run(scenario())


def test_a_call_that_comes_before_the_link_is_tried_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        begun: list[JobStream | GatewayError] = []

        def begin(gateway: Gateway) -> None:
            assert begun or not gateway.is_ready
            try:
                begun.append(gateway.submit(a_call(gateway)))
            except GatewayError as error:
                begun.append(error)

        async with ingress(tmp_path, on_catalog=begin):
            assert isinstance(begun[0], JobStream), begun[0]
            text, _, end, _ = await _read(begun[0])
            assert (text, isinstance(end, Done)) == ("".join(WORDS), True)

    run(scenario())


def test_a_stream_that_the_owner_resumes_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ingress(tmp_path) as (gateway, owner, worker):
            worker.dies_after = 7
            job = a_call(gateway)
            text, indexes, end, restarts = await _answer(gateway, job)
            assert (text, restarts) == ("".join(WORDS), 0)
            assert indexes == sorted(set(indexes))
            assert isinstance(end, Done)
            assert end.usage.output_tokens == len(WORDS)
            await async_until(lambda: len(owner.ledger.entries) == 2)
            assert [entry.attempt for entry in owner.ledger.entries] == [1, 2]

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_output_that_was_not_read_before_the_owner_resumes_counts_once(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with ingress(tmp_path) as (gateway, _, worker):
            worker.written_at_once = 30  # more than what the resumed attempt writes
            text, _, end, _ = await _answer(gateway, a_call(gateway, stream=stream))
            assert text == "".join(WORDS)
            assert isinstance(end, Done)
            assert end.usage.output_tokens == len(WORDS)

    run(scenario())


def test_a_whole_answer_that_the_owner_begins_again_has_no_part_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ingress(tmp_path) as (gateway, _, worker):
            worker.dies_after = 7
            text, _, end, restarts = await _answer(gateway, a_call(gateway, stream=False, resume=ResumeMode.RESTART))
            assert (text, restarts) == ("".join(WORDS), 1)
            assert isinstance(end, Done)
            assert end.usage.output_tokens == len(WORDS)

    run(scenario())


def test_a_stream_continues_with_the_next_owner_under_the_next_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ingress(tmp_path) as (gateway, owner, worker):
            worker.dies_after = 3  # the owner's own second attempt is running when the owner is lost
            worker.pause_s = 0.1
            stream = gateway.submit(a_call(gateway))
            answering = asyncio.create_task(_read(stream))
            await async_until(lambda: stream.attempt.job.attempt == 2)
            await owner.stop()
            worker.pause_s = 0.0
            await async_until(lambda: owner.gateway.in_flight == 0)
            await owner.listen()
            text, _, end, _ = await answering
            assert text == "".join(WORDS)
            assert isinstance(end, Done)
            assert end.usage.output_tokens == len(WORDS)
            await async_until(lambda: len(owner.ledger.entries) == 3)
            assert [entry.attempt for entry in owner.ledger.entries] == [1, 2, 3]

    run(scenario())


def test_rate_limits_are_those_that_the_owner_reports(tmp_path: Path) -> None:
    tenant = Tenant(name="a", limits=Limits(requests_per_minute=5))

    async def scenario() -> None:
        async with ingress(tmp_path, {"a": tenant}) as (gateway, *_):
            caller = Caller(tenant)
            assert gateway.rate_limit_status(caller) is None
            await _answer(gateway, a_call(gateway))
            status = gateway.rate_limit_status(caller)
            assert status is not None
            assert (status.request_limit, status.requests_left) == (5, 4)

    run(scenario())


def test_a_job_that_the_owner_gives_up_is_not_tried_again_and_not_held_against_the_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ingress(tmp_path) as (gateway, _, worker):
            worker.returns_early = True
            for number in range(1, 6):
                _, _, end, _ = await _answer(gateway, a_call(gateway))
                assert isinstance(end, Failed)
                assert end.error.code in ("worker_lost", "no_worker")
                assert len(worker.plans) <= 3 * number
            worker.returns_early = False
            assert [report.breaker for report in gateway.worker_reports()] == ["closed"]
            await async_until(lambda: gateway.is_ready)

    run(scenario())
