"""Servers that freeze or die, idle or busy, are detected soon; live ones are never taken for dead."""

import asyncio
from typing import Any

from aiohttp import web

from inferry.domain.errors import WorkerLost, WorkerUnreachable
from inferry.domain.jobs import ResumeMode
from inferry.domain.streams import Done, Failed, Item
from inferry.domain.workers import Phase
from inferry.workers.openai_http.profiles import HOSTED, TRTLLM
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.freezing_upstream import FreezingUpstream
from support.http_jobs import a_call, a_plan, a_worker, done, failed, run
from support.token_server import TokenServer
from support.upstream import DONE, Upstream, begin, chunk, usage
from support.waiting import async_until

SOON: dict[str, Any] = {"liveness_interval_s": 0.05, "liveness_timeout_s": 0.2}
SELDOM: dict[str, Any] = {"liveness_interval_s": 1e6, "liveness_timeout_s": 0.2}


def phase(worker: OpenAIHttpWorker) -> Phase:
    return worker.view().phase


async def two_parts(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A stream whose second part comes when it is let."""
    response = await begin(request)
    await response.write(chunk("first"))
    await up.release.wait()
    await response.write(chunk(" second", "stop") + usage(3, 2) + DONE)
    return response


def test_an_idle_server_that_freezes_is_down_and_up_again_when_it_thaws() -> None:
    async def scenario() -> None:
        for more in ({}, {"profile": TRTLLM}):  # by its metrics, and by what every server has
            async with FreezingUpstream() as up:
                worker = a_worker(up, **SOON, **more)
                await worker.start()
                assert phase(worker) is Phase.READY
                up.freeze()
                await async_until(lambda: phase(worker) is Phase.DOWN)  # noqa: B023
                up.thaw()
                await async_until(lambda: phase(worker) is Phase.READY)  # noqa: B023
                await worker.close()

    run(scenario())


def test_an_idle_server_that_dies_is_down_and_up_again_when_another_listens_there() -> None:
    async def scenario() -> None:
        async with FreezingUpstream() as up:
            worker = a_worker(up, **SOON)
            await worker.start()
            await up.die()
            await async_until(lambda: phase(worker) is Phase.DOWN)
            await up.revive()
            await async_until(lambda: phase(worker) is Phase.READY)
            await worker.close()

    run(scenario())


def test_a_server_whose_tokens_flow_is_alive_whatever_it_does_not_answer() -> None:
    async def scenario() -> None:
        async with FreezingUpstream(TokenServer(itl_s=0.01)) as up:
            worker, items = a_worker(up, **SOON), list[Item]()
            await worker.start()
            running = asyncio.create_task(worker.run(a_plan(a_call(tokens=4000)), items.append))
            await async_until(lambda: items)
            up.metrics_hang = up.models_hang = True
            probe_count = up.probe_count
            while up.probe_count < probe_count + 8:
                assert phase(worker) is Phase.READY
                await asyncio.sleep(0.01)
            assert not running.done()
            await worker.close()
            await running

    run(scenario())


def test_a_metrics_page_that_hangs_is_not_the_end_of_its_server() -> None:
    async def scenario() -> None:
        async with FreezingUpstream() as up:
            worker = a_worker(up, **SOON)
            await worker.start()
            up.metrics_hang = True
            probe_count = up.probe_count
            while up.probe_count < probe_count + 8:
                assert phase(worker) is Phase.READY
                await asyncio.sleep(0.01)
            await worker.close()

    run(scenario())


def test_a_hosted_api_gets_no_probes() -> None:
    async def scenario() -> None:
        async with FreezingUpstream() as up:
            worker = a_worker(up, profile=HOSTED, **SOON)
            await worker.start()
            probe_count = up.probe_count
            await asyncio.sleep(0.3)
            assert up.probe_count == probe_count
            assert worker.view().last_activity_at is None
            await worker.close()

    run(scenario())


def test_calls_that_another_worker_can_take_are_lost_at_once_and_others_wait_for_the_thaw() -> None:
    async def scenario() -> None:
        async with FreezingUpstream(two_parts) as up:
            worker, items = a_worker(up, **SOON), list[Item]()
            await worker.start()
            stays = a_call("stays", stream=True, resume=ResumeMode.RESTART)
            whole = a_call("whole", stream=False, resume=ResumeMode.RESTART)
            running = asyncio.create_task(worker.run(a_plan(stays, whole), items.append))
            await async_until(lambda: len(items) == 2)
            up.freeze()
            unseen = asyncio.create_task(worker.run(a_plan(a_call("unseen", stream=True)), items.append))
            await async_until(lambda: phase(worker) is Phase.DOWN)
            ends = {item.job_id: item for item in items if isinstance(item, Done | Failed)}
            assert ends.keys() == {"whole", "unseen"}
            assert all(isinstance(end, Failed) and isinstance(end.error, WorkerLost) for end in ends.values())
            up.thaw()
            up.release.set()
            await asyncio.gather(running, unseen)
            assert isinstance(items[-1], Done)
            assert items[-1].job_id == "stays"
            await worker.close()

    run(scenario())


def test_an_unresponsive_server_is_sent_nothing() -> None:
    async def scenario() -> None:
        async with FreezingUpstream() as up:
            worker, items = a_worker(up, **SOON), list[Item]()
            await worker.start()
            up.freeze()
            await async_until(lambda: phase(worker) is Phase.DOWN)
            await worker.run(a_plan(a_call()), items.append)
            assert isinstance(failed(items).error, WorkerUnreachable)
            up.thaw()
            await async_until(lambda: phase(worker) is Phase.READY)
            assert not up.bodies
            items.clear()
            await worker.run(a_plan(a_call(tokens=3)), items.append)
            assert done(items)
            await worker.close()

    run(scenario())


def test_a_call_that_cannot_connect_is_reported_as_unsent_and_triggers_a_liveness_probe() -> None:
    async def scenario() -> None:
        for more in ({}, {"profile": TRTLLM}):
            async with FreezingUpstream() as up:
                worker, items = a_worker(up, **SELDOM, **more), list[Item]()
                await worker.start()
                await async_until(lambda: not worker.open_calls)  # noqa: B023
                await asyncio.sleep(1.0)  # virtual: nothing was heard at the moment it dies
                await up.die()
                await asyncio.sleep(1.0)  # kept connections are seen to be closed
                await worker.run(a_plan(a_call()), items.append)
                error = failed(items).error
                assert isinstance(error, WorkerUnreachable)
                assert (error.status, error.code, error.can_failover) == (503, "no_worker", True)
                await async_until(lambda: phase(worker) is Phase.DOWN)  # noqa: B023
                await worker.close()

    run(scenario())


def test_jobs_of_a_frozen_server_are_not_reported_as_freed() -> None:
    async def scenario() -> None:
        for aborts in (False, True):
            async with FreezingUpstream(two_parts) as up:
                up.aborts = aborts
                worker, items = a_worker(up, **SELDOM), list[Item]()
                await worker.start()
                running = asyncio.create_task(worker.run(a_plan(a_call(tokens=4000)), items.append))
                await async_until(lambda: items)  # noqa: B023
                up.freeze()
                assert await worker.cancel(["j"]) == frozenset()
                await running
                assert isinstance(items[-1], Failed)
                await worker.close()

    run(scenario())
