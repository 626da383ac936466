"""Calls while no worker of their model is up wait for the outage timeout, and none is lost."""

import asyncio

import pytest

from inferry.dispatch.outage_timeout import outage_error
from inferry.domain.attempts import Attempt
from inferry.domain.errors import ConnectFailed, GatewayError, NoWorker, QueueTimeout, WorkerLost, WorkerUnreachable
from inferry.domain.jobs import ResumeMode
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.recovery import MAX_LOSSES, Retry, next_attempt
from inferry.domain.streams import Done, End, Failed
from inferry.domain.values import replace
from inferry.domain.workers import Phase
from support.builders import a_job
from support.loop_helpers import read
from support.virtual_gateway import FreezingWorker, VirtualGateway, a_virtual_gateway
from support.virtual_time import run_virtual

REFUSED = Failed("", WorkerUnreachable("connection refused"))


async def dies(house: VirtualGateway, worker: FreezingWorker) -> None:
    worker.refuses = REFUSED
    worker.phase = Phase.DOWN
    await house.until(lambda: house.phase(worker) is Phase.DOWN)


def comes_back(worker: FreezingWorker) -> None:
    worker.refuses = None
    worker.phase = Phase.READY


def error_of(end: End) -> GatewayError:
    assert isinstance(end, Failed)
    return end.error


def test_a_call_to_a_worker_that_died_while_idle_is_served_after_its_restart() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        async with a_virtual_gateway(worker) as house:
            worker.refuses = REFUSED  # and nothing has noticed yet
            stream = house.submit()
            await house.until(lambda: worker.plans)
            worker.phase = Phase.DOWN
            await asyncio.sleep(20)
            comes_back(worker)
            assert isinstance((await read(stream))[1], Done)

    run_virtual(scenario())


def test_one_call_to_a_server_that_is_not_polled_and_accepts_no_connection_finds_its_worker_down() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        async with a_virtual_gateway(worker) as house:
            worker.refuses = Failed("", ConnectFailed("connection refused"))  # and by its own word it is ready
            began_at = asyncio.get_running_loop().time()
            async with asyncio.timeout(600):
                error = error_of((await read(house.submit()))[1])
            assert type(error) is NoWorker
            assert 30 <= asyncio.get_running_loop().time() - began_at < 40
            assert house.phase(worker) is Phase.DOWN
            stream = house.submit()
            comes_back(worker)
            assert isinstance((await read(stream))[1], Done)

    run_virtual(scenario())


def test_a_call_that_arrives_while_its_worker_is_down_waits() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        async with a_virtual_gateway(worker) as house:
            await dies(house, worker)
            stream = house.submit()
            await asyncio.sleep(20)
            comes_back(worker)
            assert isinstance((await read(stream))[1], Done)

    run_virtual(scenario())


def test_after_the_timeout_a_call_that_never_started_gets_no_worker_with_retry_after() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        async with a_virtual_gateway(worker) as house:
            worker.refuses = REFUSED
            began = house.clock.now()
            first = house.submit()
            await house.until(lambda: worker.plans)
            worker.phase = Phase.DOWN
            await asyncio.sleep(10)
            second = house.submit()
            for stream, at_s in ((first, 30), (second, 40)):
                error = error_of((await read(stream))[1])
                assert (type(error), error.status, error.code) == (NoWorker, 503, "no_worker")
                assert error.retry_after_s is not None
                assert house.clock.now() - began == pytest.approx(at_s, abs=1.0)

    run_virtual(scenario())


def test_jobs_queued_before_the_outage_wait_at_most_the_outage_timeout() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        worker.capacity = replace(worker.capacity, sequences=1)
        async with a_virtual_gateway(worker) as house:
            worker.gate.clear()
            running, queued = house.submit(), house.submit()
            await asyncio.sleep(100)
            worker.phase = Phase.DOWN
            began = house.clock.now()
            assert isinstance(error_of((await read(queued))[1]), NoWorker)
            assert house.clock.now() - began == pytest.approx(30, abs=1.0)
            worker.gate.set()
            await read(running)

    run_virtual(scenario())


def test_an_answer_whose_precision_is_out_ends_after_the_timeout_though_another_is_up() -> None:
    async def scenario() -> None:
        workers = [FreezingWorker(name, precision=name, can_resume=True) for name in ("bf16", "fp8")]
        async with a_virtual_gateway(*workers) as house:
            for worker in workers:
                worker.dies_after = 1
            stream = house.submit(stream=True, resume=ResumeMode.CONTINUE)
            await house.until(lambda: any(worker.plans for worker in workers))
            (first,) = [worker for worker in workers if worker.plans]
            await dies(house, first)
            began = house.clock.now()
            error = error_of((await read(stream))[1])
            assert isinstance(error, WorkerLost)
            assert f"with precision {first.name}" in str(error)
            assert house.clock.now() - began == pytest.approx(30, abs=5.0)

    run_virtual(scenario())


def test_a_call_with_a_deadline_waits_until_its_deadline() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        async with a_virtual_gateway(worker) as house:
            await dies(house, worker)
            now = house.clock.now()
            patient, hurried = house.submit(deadline=now + 100), house.submit(deadline=now + 5)
            assert isinstance(error_of((await read(hurried))[1]), QueueTimeout)
            assert house.clock.now() - now == pytest.approx(5, abs=0.5)
            await asyncio.sleep(80)
            comes_back(worker)
            assert isinstance((await read(patient))[1], Done)

    run_virtual(scenario())


def test_with_an_outage_timeout_of_zero_a_call_is_refused_at_once() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        async with a_virtual_gateway(worker, no_worker_timeout_s=0.0) as house:
            await dies(house, worker)
            with pytest.raises(NoWorker) as refusal:
                house.submit()
            assert refusal.value.retry_after_s is not None

    run_virtual(scenario())


def test_a_worker_that_reports_down_is_probed_once_it_reports_up() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        async with a_virtual_gateway(worker) as house:
            await dies(house, worker)
            await asyncio.sleep(60)
            assert not worker.plans
            comes_back(worker)
            began = house.clock.now()
            await house.until(lambda: house.phase(worker) is Phase.READY)
            assert house.clock.now() - began < 1.0

    run_virtual(scenario())


def test_a_down_worker_reports_no_running_jobs() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        async with a_virtual_gateway(worker) as house:
            worker.gate.clear()
            stream = house.submit()
            await house.until(lambda: house.pool.view("a").load.running == 1)
            await dies(house, worker)
            worker.gate.set()
            await house.until(lambda: house.pool.view("a").load.running == 0, 10)
            await read(stream)

    run_virtual(scenario())


def test_an_unreachable_worker_does_not_count_as_a_lost_attempt() -> None:
    job = a_job()
    for number in range(MAX_LOSSES + 3):
        attempt = Attempt(job)
        plan = BatchPlan(plan_id=0, worker=f"w{number}", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
        attempt.sent(plan, 0.0)
        again = next_attempt(attempt, Failed(job.job_id, WorkerUnreachable("refused")))
        assert isinstance(again, Retry)
        job = again.job
    assert (job.attempt, job.unreachable_attempts) == (MAX_LOSSES + 4, MAX_LOSSES + 3)
    for number in range(MAX_LOSSES):
        attempt = Attempt(job)
        again = next_attempt(attempt, Failed(job.job_id, WorkerLost("died")))
        assert isinstance(again, Retry) == (number < MAX_LOSSES - 1)
        job = again.job if isinstance(again, Retry) else job


def test_a_started_job_ends_as_worker_lost_and_an_unsent_one_as_no_worker() -> None:
    assert isinstance(outage_error(a_job(), 30.0), NoWorker)
    assert isinstance(outage_error(replace(a_job(), attempt=4, preemptions=1, unreachable_attempts=2), 30.0), NoWorker)
    assert isinstance(outage_error(replace(a_job(), attempt=2), 30.0), WorkerLost)
