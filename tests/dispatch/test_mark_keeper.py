"""Marks of budgets on an event loop: a call waits for its own, never for another's, and not for ever."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from admission.callers import a_caller
from inferry.admission.gate import Gate
from inferry.admission.marks import Marks
from inferry.dispatch import loop as loop_module
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.mark_keeper import MarkKeeper
from inferry.dispatch.pool import Pool
from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.spending import Mark, MarkBatch
from inferry.domain.streams import Done, Failed
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.builders import a_job
from support.houses import ListLedger, read
from support.scripted_worker import ScriptedWorker

LIMITED = a_caller("a", day_token_ceiling=1_000_000)
FREE = a_caller("b")


def run(work: Coroutine[Any, Any, None]) -> None:
    """In real time: a disk and a recorder have threads of their own."""
    asyncio.run(asyncio.wait_for(work, 120))


class Disk:
    """A store of marks whose disk may be slow or broken."""

    def __init__(self) -> None:
        self.marks: dict[tuple[str, str, str], Mark] = {}
        self.works = threading.Event()
        self.works.set()
        self.fails = 0
        self.batches = 0

    def read(self) -> list[Mark]:
        return list(self.marks.values())

    def write(self, batch: MarkBatch) -> None:
        self.works.wait(30)
        if self.fails:
            self.fails -= 1
            raise OSError("no space left on device")
        self.batches += 1
        for mark in batch.kept:
            self.marks[mark.scope, mark.name, mark.period] = mark
        for mark in batch.gone:
            self.marks.pop((mark.scope, mark.name, mark.period), None)

    def close(self) -> None:
        pass


class House:
    def __init__(self, disk: Disk, idle_s: float, sweep_s: float) -> None:
        self.worker = ScriptedWorker()
        self.clock = SystemClock()
        self.recorder = Recorder(ListLedger())
        gate = Gate({}, marks=Marks())
        self.keeper = MarkKeeper(gate, disk, self.recorder, self.clock, sweep_s=sweep_s, idle_s=idle_s)
        self.gateway = Gateway(
            lanes=DEFAULT_LANES,
            pool=Pool([self.worker], self.clock),
            recorder=self.recorder,
            metrics=Metrics(["m"], [self.worker.name]),
            clock=self.clock,
            gate=gate,
            marks=self.keeper,
        )


@asynccontextmanager
async def a_house(disk: Disk, idle_s: float = 60.0, sweep_s: float = 60.0) -> AsyncIterator[House]:
    house = House(disk, idle_s, sweep_s)
    house.gateway.start()
    while not house.gateway.is_ready:
        await asyncio.sleep(0)
    try:
        yield house
    finally:
        disk.works.set()
        await house.gateway.close()


def test_a_call_under_a_ceiling_is_not_served_before_its_mark_is_written() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            disk.works.clear()
            held = house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED)
            free = house.gateway.submit(a_job(at=house.clock.now(), tenant="b"), FREE)
            _, end = await read(free)
            assert isinstance(end, Done)
            served = [job.tenant for plan in house.worker.plans for job in plan.jobs]
            assert served == ["b"]
            disk.works.set()
            _, end = await read(held)
            assert isinstance(end, Done)
            assert disk.marks["tenant", "", "day"].tokens > 0
        assert disk.marks == {}

    run(body())


def test_calls_that_come_together_wait_for_one_write() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            jobs = [a_job(at=house.clock.now(), tenant="a") for _ in range(50)]
            streams = [house.gateway.submit(job, LIMITED) for job in jobs]
            for stream in streams:
                await read(stream)
            assert disk.batches <= 2

    run(body())


def test_a_disk_that_fails_for_a_while_only_delays() -> None:
    async def body() -> None:
        disk = Disk()
        disk.fails = 2
        async with a_house(disk) as house:
            _, end = await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            assert isinstance(end, Done)

    run(body())


@pytest.mark.plain
def test_a_call_whose_mark_cannot_be_written_fails_and_may_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "HELD_S", 0.05)

    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            disk.works.clear()
            _, end = await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            assert isinstance(end, Failed)
            assert (end.error.status, end.error.code, end.error.retryable) == (503, "ledger_unavailable", True)
            assert house.gateway.entrance.gate.report("a")[0].leased_tokens == 0
            disk.works.set()
            _, end = await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            assert isinstance(end, Done)

    run(body())


def test_a_call_that_is_cancelled_while_it_waits_for_its_mark_never_runs() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            disk.works.clear()
            job = a_job(at=house.clock.now(), tenant="a")
            stream = house.gateway.submit(job, LIMITED)
            house.gateway.cancel(job.job_id)
            _, end = await read(stream)
            assert isinstance(end, Failed)
            disk.works.set()
            _, end = await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            assert isinstance(end, Done)
            assert job.job_id not in [one.job_id for plan in house.worker.plans for one in plan.jobs]

    run(body())


def test_marks_of_idle_accounts_are_given_up_while_it_runs() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk, 0.0, 0.01) as house:
            await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            async with asyncio.timeout(120):
                while disk.marks:
                    await asyncio.sleep(0.01)

    run(body())


def test_a_database_that_is_another_one_gets_every_mark_again() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            spent = house.gateway.entrance.gate.report("a")[0].spent_tokens
            assert spent > 0
            disk.marks.clear()
            house.keeper.start_over()
            async with asyncio.timeout(120):
                while not disk.marks:
                    await asyncio.sleep(0.01)
        # The rows are in the file that is gone, so what was spent stays in the new one.
        assert disk.marks["tenant", "", "day"].tokens == spent

    run(body())


def test_a_long_stream_alone_has_its_mark_raised_in_time() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            house.worker.words = ("w",) * 6_000
            job = a_job(at=house.clock.now(), tenant="a", output=6_000)
            _, end = await read(house.gateway.submit(job, a_caller("a", day_token_ceiling=20_000)))
            assert isinstance(end, Done)
            assert end.stopped is None
            assert end.usage.output_tokens == 6_000
            assert disk.batches >= 2

    run(body())


def test_a_clean_stop_gives_up_any_number_of_marks() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            caller = a_caller("a", run_token_ceiling=100_000)
            jobs = [a_job(at=house.clock.now(), tenant="a", run_id=f"r{number}") for number in range(1_500)]
            for stream in [house.gateway.submit(job, caller) for job in jobs]:
                await read(stream)
            assert len(disk.marks) == 1_500
        assert disk.marks == {}

    run(body())
