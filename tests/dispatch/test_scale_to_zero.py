"""A standby for replicas that do not run, and the advice that starts and stops them, in virtual time."""

import asyncio

import pytest

from inferry.domain.errors import NoWorker
from inferry.domain.ports import Worker
from inferry.domain.streams import Done, Failed
from inferry.domain.workers import Capacity, Phase
from inferry.workers.ray.standby import Standby
from support.loop_helpers import read
from support.virtual_gateway import FreezingWorker, VirtualGateway, a_virtual_gateway
from support.virtual_time import run_virtual

WAIT_S = 120.0


def add_standby(house: VirtualGateway, replicas: dict[str, Worker]) -> None:
    house.pool.add(Standby("fleet", FreezingWorker("template"), replicas, WAIT_S, house.clock), "ray")


def test_a_call_for_a_model_without_a_replica_waits_for_one() -> None:
    async def scenario() -> None:
        replicas: dict[str, Worker] = {}
        async with a_virtual_gateway() as house:
            add_standby(house, replicas)
            assert house.pool.is_ready
            assert set(house.pool.cards()) == {"m"}
            stream = house.submit()
            await asyncio.sleep(100)
            replica = FreezingWorker("fleet-1")
            replicas[replica.name] = replica
            house.pool.add(replica, "ray")
            assert isinstance((await read(stream))[1], Done)
            assert replica.plans

    run_virtual(scenario())


def test_the_wait_for_a_replica_is_bounded() -> None:
    async def scenario() -> None:
        async with a_virtual_gateway() as house:
            add_standby(house, {})
            began = house.clock.now()
            end = (await read(house.submit()))[1]
            assert isinstance(end, Failed)
            assert isinstance(end.error, NoWorker)
            assert house.clock.now() - began == pytest.approx(WAIT_S, abs=1.0)

    run_virtual(scenario())


def test_a_queued_call_survives_the_removal_of_the_last_replica() -> None:
    async def scenario() -> None:
        replica = FreezingWorker("fleet-1")
        replica.capacity = Capacity(sequences=1)
        async with a_virtual_gateway(replica) as house:
            add_standby(house, {replica.name: replica})
            replica.gate.clear()
            running, queued = house.submit(), house.submit()
            await house.until(lambda: replica.plans)
            removing = asyncio.create_task(house.pool.remove("fleet-1", 5.0))
            await asyncio.sleep(1)
            replica.gate.set()
            assert isinstance((await read(running))[1], Done)
            await removing
            house.pool.add(FreezingWorker("fleet-2"), "ray")
            assert isinstance((await read(queued))[1], Done)

    run_virtual(scenario())


def test_a_draining_worker_gets_no_calls_and_no_probes_and_completes_what_it_has() -> None:
    async def scenario() -> None:
        leaving, other = FreezingWorker("a"), FreezingWorker("b")
        async with a_virtual_gateway(leaving) as house:
            leaving.gate.clear()
            running = house.submit()
            await house.until(lambda: leaving.plans)
            plans, probes = len(leaving.plans), house.pool._supervisors["a"]._probes
            leaving.phase = Phase.DRAINING
            await house.until(lambda: house.phase(leaving) is Phase.DRAINING)
            house.pool.add(other)
            assert isinstance((await read(house.submit()))[1], Done)
            await asyncio.sleep(60)
            assert len(leaving.plans) == plans
            assert house.pool._supervisors["a"]._probes == probes
            leaving.gate.set()
            assert isinstance((await read(running))[1], Done)

    run_virtual(scenario())


def test_advice_counts_what_runs_and_what_waits() -> None:
    async def scenario() -> None:
        worker = FreezingWorker("a")
        worker.capacity = Capacity(sequences=2)
        async with a_virtual_gateway(worker) as house:
            scale = house.gateway.scale
            scale.sample(house.clock.now())
            (idle,) = scale.report()
            assert (idle.group, idle.current, idle.desired) == ("default", 1, 1)
            worker.gate.clear()
            streams = [house.submit() for _ in range(5)]
            await house.until(lambda: house.gateway._loop.queue_depths())
            await asyncio.sleep(0.1)
            scale.sample(house.clock.now())
            (busy,) = scale.report()
            assert busy.capacity_in_use_workers == 1.0
            assert busy.waiting_jobs == 3
            assert busy.waiting_work_seconds > 0
            assert busy.desired == 2
            assert house.metric('inferry_desired_workers{group="default"}') == 2.0
            worker.gate.set()
            for stream in streams:
                await read(stream)

    run_virtual(scenario())


def test_a_queued_call_wants_a_first_replica() -> None:
    async def scenario() -> None:
        async with a_virtual_gateway() as house:
            add_standby(house, {})
            stream = house.submit()
            house.gateway.scale.sample(house.clock.now())
            (advice,) = house.gateway.scale.report()
            assert (advice.current, advice.desired, advice.waiting_jobs) == (0, 1, 1)
            replica = FreezingWorker("fleet-1")
            house.pool.add(replica, "ray")
            await read(stream)

    run_virtual(scenario())
