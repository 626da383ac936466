"""`tenants.<name>.weight` over several gateways: the owner of the workers applies it to the calls of all."""

import asyncio
from pathlib import Path

import pytest

from inferry.domain.streams import Done
from inferry.domain.workers import Capacity
from support.builders import a_job
from support.gateway_members import ClosingWorker, Member, members, ready
from support.loop_helpers import read
from support.waiting import async_until

CALLS = 120
"""Of each tenant."""
COUNTED = 120
"""Jobs that are counted: both tenants have work until the last of them."""
HEAVY, LIGHT = "heavy", "light"


def two_at_a_time() -> ClosingWorker:
    return ClosingWorker("engine", capacity=Capacity(sequences=2))


@pytest.mark.parametrize("weight", [3.0, 1.0])
@pytest.mark.parametrize(
    "routes", [[(0, HEAVY), (1, LIGHT)], [(1, HEAVY), (0, LIGHT)], [(0, HEAVY), (1, LIGHT), (1, HEAVY), (0, LIGHT)]]
)
def test_tenants_are_served_by_weight_whatever_gateway_their_calls_come_to(
    tmp_path: Path, weight: float, routes: list[tuple[int, str]]
) -> None:
    async def call(gateway: Member, tenant: str) -> None:
        job = a_job(tenant=tenant, at=gateway.service.gateway.now(), output=3, max_wait_s=300.0)
        _, end = await read(gateway.service.gateway.submit(job))
        assert isinstance(end, Done), end

    async def scenario() -> None:
        async with members(tmp_path, two_at_a_time, tenants={HEAVY: {"weight": weight}, LIGHT: {}}) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            a.gate.clear()
            each = 2 * CALLS // len(routes)
            calls = [asyncio.create_task(call((a, b)[at], tenant)) for _ in range(each) for at, tenant in routes]
            await async_until(lambda: sum(a.service.gateway.queue_depths().values()) == 2 * CALLS - 2)
            a.gate.set()
            await asyncio.gather(*calls)
            order = [job.tenant for plan in a.workers[0].plans for job in plan.jobs]
            counted = order[2 : 2 + COUNTED]
            assert counted.count(HEAVY) / COUNTED == pytest.approx(weight / (weight + 1), rel=0.05)

    asyncio.run(asyncio.wait_for(scenario(), 100))
