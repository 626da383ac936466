"""A cancelled run's report: each job is counted once, and freed is what an engine has confirmed."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.cancel_sender import CancelSender
from inferry.dispatch.pool import Pool
from inferry.dispatch.task_set import TaskSet
from inferry.domain.clock import SystemClock
from inferry.domain.errors import ClientClosed
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit
from inferry.domain.streams import Failed
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run
from support.scripted_worker import ScriptedWorker
from support.waiting import async_until


class SlowToConfirm(ScriptedWorker):
    """Ends cancelled jobs at once, as a worker over HTTP does; `confirms` says which of them the engine lets go of,
    and `proof` when that is known."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.confirms: set[str] | None = None
        self.proof = asyncio.Event()
        self.proof.set()
        self._emits: dict[str, Emit] = {}

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        self._emits |= {job.job_id: emit for job in plan.jobs}
        await super().run(plan, emit)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        job_ids = list(job_ids)
        for job_id in job_ids:
            self._emits[job_id](Failed(job_id, ClientClosed("cancelled")))
        found = await super().cancel(job_ids)
        await self.proof.wait()
        return found if self.confirms is None else found & self.confirms


class Gatewayed:
    def __init__(self, *workers: SlowToConfirm) -> None:
        self.workers = workers
        self.clock = SystemClock()
        self.pool = Pool(workers, self.clock)
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=self.pool,
            recorder=Recorder(ListLedger()),
            metrics=Metrics(["m"], [worker.name for worker in workers]),
            clock=self.clock,
        )

    def job(self, run_id: str = "run") -> InferenceJob:
        return a_job(at=self.clock.now(), run_id=run_id)

    async def until(self, condition: Any) -> None:
        await async_until(condition, every_s=0)


@asynccontextmanager
async def a_gateway(count: int = 1, sequences: int = 2) -> AsyncIterator[Gatewayed]:
    script: dict[str, Any] = {"capacity": Capacity(sequences=sequences), "words": ("one",) * 9}
    workers = [SlowToConfirm(name=f"w{number}", **script) for number in range(count)]
    house = Gatewayed(*workers)
    house.gateway.start()
    await house.until(lambda: all(house.pool.view(worker.name).phase is Phase.READY for worker in workers))
    for worker in workers:
        worker.gate.clear()
    try:
        yield house
    finally:
        for worker in workers:
            worker.proof.set()
            worker.gate.set()
        await house.gateway.close()


def test_no_queued_job_of_a_cancelled_run_is_sent_when_a_running_one_is_stopped() -> None:
    async def scenario() -> None:
        async with a_gateway(sequences=2) as house:
            (worker,) = house.workers
            streams = [house.gateway.submit(house.job()) for _ in range(6)]
            await house.until(lambda: worker.running == 2)
            report = await house.gateway.cancel_run("a", "run")
            assert (report.queued, report.running, report.freed, report.unconfirmed) == (4, 2, 2, 0)
            await asyncio.gather(*map(read, streams))
            assert sum(len(plan.jobs) for plan in worker.plans) == 2

    run(scenario())


def test_freed_counts_only_jobs_that_the_engine_confirmed() -> None:
    async def scenario() -> None:
        async with a_gateway(sequences=4) as house:
            (worker,) = house.workers
            jobs = [house.job() for _ in range(4)]
            streams = [house.gateway.submit(job) for job in jobs]
            await house.until(lambda: worker.running == 4)
            worker.confirms = {jobs[0].job_id}
            report = await house.gateway.cancel_run("a", "run")
            await asyncio.gather(*map(read, streams))
            assert (report.running, report.freed, report.unconfirmed) == (4, 1, 3)

    run(scenario())


def test_a_confirmation_after_the_wait_time_counts_as_unconfirmed() -> None:
    async def scenario() -> None:
        async with a_gateway(2, sequences=2) as house:
            slow, prompt = house.workers
            slow.proof.clear()
            streams = [house.gateway.submit(house.job()) for _ in range(4)]
            await house.until(lambda: slow.running == 2 and prompt.running == 2)
            report = await house.gateway.cancel_run("a", "run", wait_s=0.05)
            await asyncio.gather(*map(read, streams))
            assert (report.running, report.freed, report.unconfirmed) == (4, 2, 2)

    run(scenario())


def test_the_report_is_returned_with_the_last_confirmation() -> None:
    async def scenario() -> None:
        async with a_gateway() as house:
            (worker,) = house.workers
            worker.proof.clear()
            stream = house.gateway.submit(house.job())
            await house.until(lambda: worker.running == 1)
            cancelling = asyncio.create_task(house.gateway.cancel_run("a", "run", wait_s=1e6))
            await read(stream)
            await asyncio.wait([cancelling], timeout=0.05)
            assert not cancelling.done()
            worker.proof.set()
            assert (await cancelling).freed == 1

    run(scenario())


def test_a_job_lost_on_a_worker_that_is_still_down_is_unconfirmed() -> None:
    async def scenario() -> None:
        async with a_gateway(2, sequences=4) as house:
            lost, other = house.workers
            stream = house.gateway.submit(house.job())
            await house.until(lambda: lost.running + other.running == 1)
            if other.running:
                lost, other = other, lost
            lost.phase = Phase.DOWN
            lost.dies_after = 0
            lost.gate.set()
            await house.until(lambda: other.running == 1)
            report = await house.gateway.cancel_run("a", "run")
            await read(stream)
            assert (report.queued, report.running, report.freed, report.unconfirmed) == (0, 1, 0, 1)

    run(scenario())


def test_an_execution_shared_with_another_run_is_neither_freed_nor_unconfirmed() -> None:
    async def scenario() -> None:
        async with a_gateway(sequences=4) as house:
            (worker,) = house.workers
            job = house.job()
            greedy = replace(job, payload=replace(job.payload, sampling=replace(job.payload.sampling, temperature=0.0)))
            first = house.gateway.submit(greedy)
            other = house.gateway.submit(replace(greedy, job_id="other", run_id="other"))
            await house.until(lambda: worker.running == 1)
            report = await house.gateway.cancel_run("a", "run", wait_s=0.0)
            assert (report.queued, report.running, report.freed, report.unconfirmed) == (1, 0, 0, 0)
            await read(first)
            house.gateway.cancel("other", ClientClosed("left"))
            await read(other)

    run(scenario())


def test_a_cancel_reaches_a_worker_after_the_plan_of_its_job() -> None:
    async def scenario() -> None:
        arrived: list[str] = []

        class Recording(ScriptedWorker):
            async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
                arrived.extend(f"cancel {job_id}" for job_id in job_ids)
                return frozenset(job_ids)

        async def plan(job_id: str) -> None:
            arrived.append(f"plan {job_id}")

        worker, tasks = Recording(), TaskSet()
        sender = CancelSender(lambda name: worker, tasks.spawn)
        tasks.spawn(plan("a"))
        sender.plan_sent("scripted")
        first = sender.send("scripted", "a")
        tasks.spawn(plan("b"))
        sender.plan_sent("scripted")
        second = sender.send("scripted", "b")
        assert await first.confirmed == {"a"}
        assert await second.confirmed == {"b"}
        assert arrived == ["plan a", "cancel a", "plan b", "cancel b"]

    run(scenario())
