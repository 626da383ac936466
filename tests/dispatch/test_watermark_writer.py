"""Budget watermarks on the event loop: a call waits only for its own, and for a bounded time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from admission.builders import a_caller
from inferry.admission.overflow_budget import OverflowBudget
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.watermarks import WatermarkTracker
from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch import loop as loop_module
from inferry.dispatch.pool import Pool
from inferry.dispatch.watermark_writer import WatermarkWriter
from inferry.domain.clock import SystemClock
from inferry.domain.errors import NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.spending import Watermark, WatermarkBatch
from inferry.domain.streams import Done, Failed
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.builders import a_job
from support.loop_helpers import ListLedger, read
from support.scripted_worker import ScriptedWorker

CEILING_NANOS = 100_000
LIMITED = a_caller("a", day_token_ceiling=1_000_000)
FREE = a_caller("b")


def run(work: Coroutine[Any, Any, None]) -> None:
    """In real time: a disk and a recorder have threads of their own."""
    asyncio.run(asyncio.wait_for(work, 120))


class Disk:
    """A store of watermarks whose disk may be slow or broken."""

    def __init__(self) -> None:
        self.watermarks: dict[tuple[str, str, str], Watermark] = {}
        self.works = threading.Event()
        self.works.set()
        self.fails = 0
        self.batches = 0

    def read(self) -> list[Watermark]:
        return list(self.watermarks.values())

    def write(self, batch: WatermarkBatch) -> None:
        self.works.wait(30)
        if self.fails:
            self.fails -= 1
            raise OSError("no space left on device")
        self.batches += 1
        for watermark in batch.upserts:
            self.watermarks[watermark.scope, watermark.name, watermark.period] = watermark
        for watermark in batch.deletes:
            self.watermarks.pop((watermark.scope, watermark.name, watermark.period), None)

    def close(self) -> None:
        pass


class HostedWorker(ScriptedWorker):
    def view(self) -> WorkerView:
        return replace(super().view(), overflow=True)


class AbsentWorker(ScriptedWorker):
    async def start(self) -> None:
        raise WorkerLost("the script said so")


class House:
    """With `hosted`, all calls of P0 overflow, since the own worker never starts; one is afforded."""

    def __init__(self, disk: Disk, idle_s: float, sweep_s: float, *, hosted: bool = False) -> None:
        self.worker = HostedWorker() if hosted else ScriptedWorker()
        workers = [AbsentWorker("own"), self.worker] if hosted else [self.worker]
        self.clock = SystemClock()
        self.recorder = Recorder(ListLedger())
        tracker = WatermarkTracker()
        gate = QuotaGate({}, watermarks=tracker)
        price = {"m": Price(input=1.0, output=1.0)}
        overflow = OverflowBudget(price, CEILING_NANOS / NANOS_PER_UNIT, watermarks=tracker) if hosted else None
        self.keeper = WatermarkWriter(gate, disk, self.recorder, self.clock, overflow, sweep_s=sweep_s, idle_s=idle_s)
        self.pool = Pool(workers, self.clock)
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=self.pool,
            recorder=self.recorder,
            metrics=Metrics(["m"], [worker.name for worker in workers]),
            clock=self.clock,
            gate=gate,
            watermarks=self.keeper,
            overflow=overflow,
        )


@asynccontextmanager
async def a_house(
    disk: Disk, idle_s: float = 60.0, sweep_s: float = 60.0, *, hosted: bool = False
) -> AsyncIterator[House]:
    house = House(disk, idle_s, sweep_s, hosted=hosted)
    house.gateway.start()
    while house.pool.view(house.worker.name).phase is not Phase.READY:
        await asyncio.sleep(0)
    try:
        yield house
    finally:
        disk.works.set()
        await house.gateway.close()


def test_a_call_under_a_ceiling_is_not_served_before_its_watermark_is_written() -> None:
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
            assert disk.watermarks["tenant", "", "day"].tokens > 0
        assert disk.watermarks == {}

    run(body())


def test_a_call_that_overflows_is_not_sent_before_its_cost_is_written() -> None:
    async def body() -> None:
        disk, left = Disk(), Disk()
        async with a_house(disk, hosted=True) as house:

            def a_call() -> InferenceJob:
                return replace(a_job(at=house.clock.now(), tenant="b", lane=Lane.P0), token_budget=3)

            disk.works.clear()
            held = house.gateway.submit(a_call(), FREE)
            for _ in range(5):
                await asyncio.sleep(0)
            assert house.worker.plans == []
            disk.works.set()
            _, end = await read(held)
            assert isinstance(end, Done)
            (mark,) = disk.watermarks.values()
            assert (mark.scope, mark.tenant, mark.nanos) == ("overflow", "b", CEILING_NANOS)
            left.watermarks = dict(disk.watermarks)
        assert disk.watermarks == {}
        async with a_house(left, hosted=True) as after_kill:
            with pytest.raises(NoWorker):
                after_kill.gateway.submit(a_call(), FREE)
            assert after_kill.worker.plans == []

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
def test_a_call_whose_watermark_cannot_be_written_fails_and_is_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "BUDGET_HOLD_S", 0.05)

    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            disk.works.clear()
            _, end = await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            assert isinstance(end, Failed)
            assert (end.error.status, end.error.code, end.error.retryable) == (503, "ledger_unavailable", True)
            assert house.gateway._admission.gate.report("a")[0].leased_tokens == 0
            disk.works.set()
            _, end = await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            assert isinstance(end, Done)

    run(body())


def test_a_call_cancelled_while_it_waits_for_its_watermark_never_runs() -> None:
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


def test_watermarks_of_idle_accounts_are_released_while_running() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk, 0.0, 0.01) as house:
            await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            async with asyncio.timeout(120):
                while disk.watermarks:
                    await asyncio.sleep(0.01)

    run(body())


def test_a_replaced_database_gets_every_watermark_again() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            await read(house.gateway.submit(a_job(at=house.clock.now(), tenant="a"), LIMITED))
            spent = house.gateway._admission.gate.report("a")[0].spent_tokens
            assert spent > 0
            disk.watermarks.clear()
            house.keeper.rewrite_all()
            async with asyncio.timeout(120):
                while not disk.watermarks:
                    await asyncio.sleep(0.01)
        # The rows are in the file that is gone, so what was spent stays in the new one.
        assert disk.watermarks["tenant", "", "day"].tokens == spent

    run(body())


def test_a_single_long_stream_has_its_watermark_raised_in_time() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            house.worker.words = ("w",) * 6_000
            house.worker.pause_s = 0.0002  # an engine takes time as well: half a block is seconds of writing
            job = a_job(at=house.clock.now(), tenant="a", output=6_000)
            _, end = await read(house.gateway.submit(job, a_caller("a", day_token_ceiling=20_000)))
            assert isinstance(end, Done)
            assert end.stopped is None
            assert end.usage.output_tokens == 6_000
            assert disk.batches >= 2

    run(body())


def test_a_clean_stop_releases_any_number_of_watermarks() -> None:
    async def body() -> None:
        disk = Disk()
        async with a_house(disk) as house:
            caller = a_caller("a", run_token_ceiling=100_000)
            jobs = [a_job(at=house.clock.now(), tenant="a", run_id=f"r{number}") for number in range(1_500)]
            for stream in [house.gateway.submit(job, caller) for job in jobs]:
                await read(stream)
            assert len(disk.watermarks) == 1_500
        assert disk.watermarks == {}

    run(body())
