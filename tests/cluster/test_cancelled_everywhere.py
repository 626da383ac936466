"""How long it takes until a run that one gateway cancels has ended at the others, in virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest

from inferry.cli.sharing_wiring import GatewaySharing, SharedLimits, share
from inferry.cluster.run_links import Link, ReadLinks
from inferry.domain.callers import ANONYMOUS
from inferry.domain.errors import RunCancelled
from inferry.domain.streams import Failed
from inferry.domain.values import replace
from support.loop_helpers import read, run
from support.scripted_worker import ScriptedWorker
from support.virtual_gateway import VirtualGateway, a_virtual_gateway
from support.virtual_time import LoopClock

CANCELLED_WITHIN_S = 0.25
LATE_SUB_RUN_WITHIN_S = 0.5
"""For a sub-run whose parent was named at another gateway just before."""
ONE_WAY_S = 0.02
"""Time to Redis and time back, each: twenty times that within a data centre."""


class FarStreams:
    """The streams of cancelled runs and of parents, as far away as a slow Redis."""

    def __init__(self) -> None:
        self._cancelled: list[tuple[str, str, str]] = []
        self._links: list[Link] = []
        self._added = asyncio.Event()

    async def announce_cancelled(self, gateway: str, tenant: str, run_id: str) -> None:
        await asyncio.sleep(ONE_WAY_S)
        self._cancelled.append((gateway, tenant, run_id))
        self._added.set()
        self._added = asyncio.Event()
        await asyncio.sleep(ONE_WAY_S)

    async def next_cancelled(self, position: str) -> tuple[str, list[tuple[str, str, str]]]:
        await asyncio.sleep(ONE_WAY_S)
        start = int(position.partition("-")[0])
        if len(self._cancelled) == start:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._added.wait()
        found = self._cancelled[start:]
        await asyncio.sleep(ONE_WAY_S)
        return f"{start + len(found)}-0", found

    async def exchange_links(self, position: str, links: Sequence[Link]) -> ReadLinks:
        await asyncio.sleep(ONE_WAY_S)
        self._links += links
        start = int(position.partition("-")[0])
        found = self._links[start:]
        await asyncio.sleep(ONE_WAY_S)
        return ReadLinks(f"{start + len(found)}-0", found, True, "redis")


class SharingGateway:
    """A gateway whose engine never ends a call by itself."""

    def __init__(self, env: VirtualGateway, worker: ScriptedWorker, sharing: GatewaySharing) -> None:
        self.env, self.worker, self.sharing = env, worker, sharing

    def begin(self, run_id: str, parent: str | None = None) -> "asyncio.Task[float]":
        """A call, as the HTTP server submits it. The result is the time at which it ended as cancelled."""
        return asyncio.create_task(self._call(run_id, parent))

    async def _call(self, run_id: str, parent: str | None) -> float:
        gateway = self.env.gateway
        job = replace(self.env.job(run_id=run_id), parent_run=parent)
        assert gateway.lineages.pending(job, ANONYMOUS) is None
        _, end = await read(gateway.submit(job))
        assert isinstance(end, Failed), end
        assert isinstance(end.error, RunCancelled), end
        return self.env.clock.now()


@asynccontextmanager
async def three_gateways() -> AsyncIterator[list[SharingGateway]]:
    streams, found = FarStreams(), []
    async with AsyncExitStack() as stack:
        for number in range(3):
            worker = ScriptedWorker(clock=LoopClock())
            env = await stack.enter_async_context(a_virtual_gateway(worker))
            worker.gate.clear()
            nothing = cast(Any, None)
            limits = SharedLimits(f"gateway-{number}", cast(Any, streams), nothing, nothing, nothing)
            sharing = share(limits, env.gateway, env.metrics, since=0.0)
            sharing.start()
            stack.push_async_callback(sharing.links.close)
            stack.push_async_callback(sharing.runs.close)
            found.append(SharingGateway(env, worker, sharing))
        yield found


def at_every_phase(scenario: Callable[[float], Awaitable[None]]) -> None:
    """The scenario, begun at several times between two polls of the gateways."""
    for step in range(8):
        run(cast(Any, scenario(step * 0.033)))


def test_a_cancelled_run_and_its_sub_runs_end_at_every_gateway_within_250_ms() -> None:
    async def scenario(phase_s: float) -> None:
        async with three_gateways() as (first, second, third):
            await asyncio.sleep(phase_s)
            named_here = second.begin("child", "doomed")
            await asyncio.sleep(CANCELLED_WITHIN_S + 2 * ONE_WAY_S)
            named_elsewhere = third.begin("child")
            calls = [second.begin("doomed") for _ in range(3)] + [named_here, named_elsewhere]
            await second.env.until(lambda: (second.worker.running, third.worker.running) == (4, 1))
            began = first.env.clock.now()
            await first.env.gateway.cancel_run("a", "doomed")
            assert max(await asyncio.gather(*calls)) - began <= CANCELLED_WITHIN_S
            assert (second.worker.running, third.worker.running) == (0, 0)
            with pytest.raises(RunCancelled):  # a new call
                await third.begin("doomed")
            assert third.env.clock.now() - began <= CANCELLED_WITHIN_S

    at_every_phase(scenario)


def test_a_sub_run_that_another_gateway_has_just_named_ends_within_500_ms() -> None:
    async def scenario(phase_s: float) -> None:
        async with three_gateways() as (first, second, third):
            await asyncio.sleep(phase_s)
            here = third.begin("child")
            await third.env.until(lambda: third.worker.running == 1)
            named = second.begin("child", "doomed")
            began = first.env.clock.now()
            await first.env.gateway.cancel_run("a", "doomed")
            assert await named - began <= CANCELLED_WITHIN_S
            assert await here - began <= LATE_SUB_RUN_WITHIN_S
            assert third.worker.running == 0

    at_every_phase(scenario)
