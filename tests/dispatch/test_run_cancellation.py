"""Cancelling a run: one call ends the whole tree, at the workers too, and no other run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.domain.errors import RunCancelled, RunNotFound
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.streams import Done, Failed
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock
from support.waiting import async_until


class DeafWorker(ScriptedWorker):
    """Counts the calls that cancel something, and may ignore them."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.calls: list[list[str]] = []
        self.is_deaf = False

    async def cancel(self, job_ids: Any) -> Any:
        self.calls.append(list(job_ids))
        return [] if self.is_deaf else await super().cancel(job_ids)


class House:
    def __init__(self, sequences: int) -> None:
        self.worker = DeafWorker(capacity=Capacity(sequences=sequences), words=("one",) * 50)
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.clock = LoopClock()
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=Pool([self.worker], self.clock),
            recorder=self.recorder,
            metrics=Metrics(["m"], [self.worker.name]),
            clock=self.clock,
        )

    def job(self, run_id: str, parent: str | None = None) -> InferenceJob:
        return replace(a_job(at=self.clock.now(), run_id=run_id), parent_run=parent)

    async def until_running(self, count: int) -> None:
        await async_until(lambda: self.worker.running >= count, every_s=0.001)

    def entries(self) -> dict[str, LedgerEntry]:
        self.recorder.flush(120)
        return {entry.job_id: entry for entry in self.ledger.entries}


@asynccontextmanager
async def a_house(sequences: int = 4) -> AsyncIterator[House]:
    house = House(sequences)
    house.gateway.start()
    while not house.gateway.is_ready:
        await asyncio.sleep(0)
    house.worker.gate.clear()
    try:
        yield house
    finally:
        house.worker.is_deaf = False
        house.worker.gate.set()
        await house.gateway.close()


def test_one_cancel_ends_queued_and_running_jobs_of_the_whole_tree() -> None:
    async def scenario() -> None:
        async with a_house(sequences=4) as house:
            runs = [("root", None), ("child", "root"), ("grandchild", "child")]
            jobs = [house.job(*runs[number % 3]) for number in range(12)]
            streams = [house.gateway.submit(job) for job in jobs]
            await house.until_running(4)
            report = await house.gateway.cancel_run("a", "root")
            assert (report.queued, report.running, report.freed, report.unconfirmed) == (8, 4, 4, 0)
            assert report.wasted_ms > 0
            ends = [end for _, end in await asyncio.gather(*map(read, streams))]
            assert all(isinstance(end, Failed) and isinstance(end.error, RunCancelled) for end in ends)
            assert house.worker.running == 0
            assert [len(call) for call in house.worker.calls] == [4], "they travel together"
            rows = house.entries()
            assert {rows[job.job_id].outcome for job in jobs} == {Outcome.CANCELLED}
            never_ran = [rows[job.job_id] for job in jobs if rows[job.job_id].queue_ms is None]
            assert len(never_ran) == 8
            assert all(not row.prompt_tokens and not row.output_tokens and not row.cost_nanos for row in never_ran)

    run(scenario())


def test_queued_jobs_are_reported_by_the_cancel_that_ended_them() -> None:
    async def scenario() -> None:
        async with a_house(sequences=1) as house:
            for _ in range(4):
                house.gateway.submit(house.job("root"))
            await house.until_running(1)
            first, second = await asyncio.gather(*(house.gateway.cancel_run("a", "root") for _ in range(2)))
            assert (first.queued, first.running) == (3, 1)
            assert (second.queued, second.running) == (0, 1), "a running job is reported until it is freed"

    run(scenario())


def test_other_runs_and_other_tenants_are_untouched() -> None:
    async def scenario() -> None:
        async with a_house(sequences=4) as house:
            doomed = [house.gateway.submit(house.job("root")) for _ in range(6)]
            other = house.gateway.submit(house.job("other"))
            theirs = house.gateway.submit(replace(house.job("root"), tenant="b"))
            await house.until_running(4)
            await house.gateway.cancel_run("a", "root")
            house.worker.gate.set()
            ends = [end for _, end in await asyncio.gather(read(other), read(theirs))]
            assert all(isinstance(end, Done) for end in ends)
            await asyncio.gather(*map(read, doomed))

    run(scenario())


def test_later_jobs_and_sub_runs_of_a_cancelled_run_are_refused() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            stream = house.gateway.submit(house.job("root"))
            await house.until_running(1)
            await house.gateway.cancel_run("a", "root")
            await read(stream)
            for late in (house.job("root"), house.job("new", "root")):
                with pytest.raises(RunCancelled, match="root"):
                    house.gateway.submit(late)

    run(scenario())


def test_a_worker_that_does_not_confirm_within_the_wait_time_is_reported() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            stream = house.gateway.submit(house.job("root"))
            await house.until_running(1)
            house.worker.is_deaf = True
            report = await house.gateway.cancel_run("a", "root", wait_s=0.02)
            assert (report.running, report.freed, report.unconfirmed) == (1, 0, 1)
            house.worker.is_deaf = False
            again = await house.gateway.cancel_run("a", "root")
            assert (again.running, again.freed, again.unconfirmed) == (1, 1, 0), "a second cancel tries again"
            await read(stream)

    run(scenario())


def test_a_job_whose_worker_is_lost_after_the_cancel_is_not_tried_again() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            stream = house.gateway.submit(house.job("root"))
            await house.until_running(1)
            house.worker.is_deaf = True
            await house.gateway.cancel_run("a", "root", wait_s=0.0)
            house.worker.dies_after = 0
            house.worker.gate.set()
            _, end = await read(stream)
            assert isinstance(end, Failed)
            assert isinstance(end.error, RunCancelled)
            assert len(house.worker.plans) == 1

    run(scenario())


def test_an_unknown_run_is_not_found_and_one_known_to_the_ledger_gets_a_tombstone() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            with pytest.raises(RunNotFound):
                await house.gateway.cancel_run("a", "nobody")
            report = await house.gateway.cancel_run("a", "yesterday", is_known=True)
            assert (report.queued, report.running) == (0, 0)
            with pytest.raises(RunCancelled):
                house.gateway.submit(house.job("yesterday"))

    run(scenario())


def test_a_call_without_a_run_can_be_cancelled_by_its_own_id() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            job = house.job("nameless")
            stream = house.gateway.submit(replace(job, run_id=job.job_id))
            await house.until_running(1)
            report = await house.gateway.cancel_run("a", job.job_id)
            assert (report.running, report.freed) == (1, 1)
            await read(stream)

    run(scenario())


def test_a_cancel_between_a_plan_and_the_start_of_its_task_is_not_lost() -> None:
    async def scenario() -> None:
        async with a_house(sequences=2) as house:
            first = [house.gateway.submit(house.job("one")) for _ in range(2)]
            second = [house.gateway.submit(house.job("two")) for _ in range(2)]
            await house.until_running(2)
            loop = asyncio.get_running_loop()
            control = house.gateway
            await control.cancel_run("a", "one", wait_s=0.0)
            async with asyncio.timeout(120):
                while all(stream.attempt.plan is None for stream in second):
                    # Every turn a cancel is on its way to the worker, also in the one in which the plan is made.
                    loop.call_soon(house.gateway._loop.cancel, first[0].attempt.job.job_id, None)
                    await asyncio.sleep(0)
            report = await control.cancel_run("a", "two", wait_s=5.0)
            assert (report.queued + report.running, report.unconfirmed) == (2, 0)
            ends = [end for _, end in await asyncio.gather(*map(read, [*first, *second]))]
            assert all(isinstance(end, Failed) for end in ends)

    run(scenario())
