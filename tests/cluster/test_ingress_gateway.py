"""The gateway of an ingress process before an owner, in one process."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inferry.admission.open_gate import OpenGate
from inferry.cli.cluster_wiring import NoLedger, RemoteWorkers, follow_rate_limits
from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.values import Sharing
from inferry.domain.callers import Caller
from inferry.domain.clock import SystemClock
from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, End, Failed, Usage
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
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
    tmp_path: Path, tenants: dict[str, Tenant] | None = None
) -> AsyncIterator[tuple[Gateway, RunningOwner, Losing]]:
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
    stream = gateway.submit(job)
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
            worker.pause_s = 0.001
            answering = asyncio.create_task(_answer(gateway, a_call(gateway)))
            await async_until(lambda: len(worker.plans) == 2 and worker.running)
            await owner.stop()
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
