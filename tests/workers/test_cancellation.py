"""Cancelled jobs end at once, and only freed jobs are reported as freed."""

import asyncio
import itertools
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.clock import ManualClock
from inferry.domain.errors import ClientClosed
from inferry.domain.streams import Delta, Done, Failed, Item
from inferry.workers.openai_http import cancellation
from inferry.workers.openai_http.profiles import TRTLLM
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.http_jobs import a_call, a_plan, a_worker, failed, run
from support.token_server import TokenServer
from support.upstream import Upstream, begin, chunk, metrics_page
from support.waiting import async_until


class Ends:
    """The ends that a worker emitted."""

    def __init__(self) -> None:
        self.by_job: dict[str, Done | Failed] = {}
        self.deltas = 0

    def __call__(self, item: Item) -> None:
        if isinstance(item, Delta):
            self.deltas += 1
        elif isinstance(item, Done | Failed):
            self.by_job[item.job_id] = item


async def stubborn(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Continues after its client has disconnected."""
    response = await begin(request)
    await response.write(chunk("a"))
    await asyncio.shield(up.release.wait())
    return response


def test_a_closed_connection_is_confirmed_by_the_engines_metrics() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.01)) as up:
            worker, ends = a_worker(up), Ends()
            await worker.start()
            jobs = [a_call(f"j{n}", tokens=4000) for n in range(4)]
            running = asyncio.create_task(worker.run(a_plan(*jobs), ends))
            await async_until(lambda: ends.deltas > 12)
            assert await worker.cancel(["j0", "j1", "j2", "nobody"]) == {"j0", "j1", "j2"}
            assert len(up.running) == 1
            assert (worker.cancelled_confirmed, worker.cancelled_unconfirmed) == (3, 0)
            assert await worker.cancel(["j3"]) == {"j3"}
            await running
            await worker.close()

    run(scenario())


def test_sequences_that_the_engine_still_runs_are_not_reported_as_freed() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.01)) as up:
            worker, ends = a_worker(up), Ends()
            await worker.start()
            running = asyncio.create_task(worker.run(a_plan(a_call(tokens=4000)), ends))
            await async_until(lambda: ends.deltas > 2)
            up.foreign = 1  # one more than the gateway has: whose it is cannot be known
            began = asyncio.get_running_loop().time()
            cancelling = asyncio.create_task(worker.cancel(["j"]))
            await running
            ended_after = asyncio.get_running_loop().time() - began
            assert await cancelling == frozenset()
            assert asyncio.get_running_loop().time() - began > ended_after  # the end did not wait for the proof
            assert isinstance(ends.by_job["j"], Failed)
            assert (worker.cancelled_confirmed, worker.cancelled_unconfirmed) == (0, 1)
            await worker.close()

    run(scenario())


def test_without_metrics_or_aborts_nothing_is_confirmed() -> None:
    async def scenario() -> None:
        for profile_settings in ({"profile": TRTLLM}, {}):
            async with Upstream(TokenServer(itl_s=0.01)) as up:
                up.shows_metrics = False
                worker, ends = a_worker(up, **profile_settings), Ends()
                await worker.start()
                running = asyncio.create_task(worker.run(a_plan(a_call(tokens=4000)), ends))
                await async_until(lambda: ends.deltas > 2)  # noqa: B023
                assert await worker.cancel(["j"]) == frozenset()
                await running
                assert worker.cancelled_unconfirmed == 1
                await async_until(lambda: up.disconnects == 1)
                await worker.close()

    run(scenario())


def test_a_call_that_has_just_been_sent_does_not_hide_one_that_is_still_there() -> None:
    async def silent(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await up.release.wait()
        return response

    async def scenario() -> None:
        async with Upstream(stubborn) as up:
            up.metrics_page = metrics_page(1)  # the cancelled one: the new one may not have reached the engine yet
            clock, ends = ManualClock(100.0), Ends()
            worker = OpenAIHttpWorker("up", HttpWorkerSettings(url=up.url), clock)
            await worker.start()
            old = asyncio.create_task(worker.run(a_plan(a_call("old")), ends))
            await async_until(lambda: ends.deltas == 1)
            cancelling = asyncio.create_task(worker.cancel(["old"]))
            await asyncio.sleep(0)
            up.script = silent
            new = asyncio.create_task(worker.run(a_plan(a_call("new")), ends))
            assert await cancelling == frozenset()
            clock.advance(1)  # by now the engine knows the new one
            up.script = stubborn
            late = asyncio.create_task(worker.run(a_plan(a_call("late")), ends))
            await async_until(lambda: ends.deltas == 2)
            assert await worker.cancel(["late"]) == {"late"}
            await worker.close()
            await asyncio.wait([old, new, late])
            up.release.set()

    run(scenario())


def test_an_abort_is_proven_by_the_end_of_the_stream() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.005)) as up:
            up.aborts = True
            up.shows_metrics = False
            worker, ends = a_worker(up), Ends()
            await worker.start()
            assert up.abort_calls == [["inferry-probe"]]
            jobs = [a_call("chat", tokens=4000), a_call("text", api="completions", tokens=4000), a_call("stays")]
            running = asyncio.create_task(worker.run(a_plan(*jobs), ends))
            await async_until(lambda: ends.deltas > 9)
            cancelling = asyncio.create_task(worker.cancel(["chat", "text"]))
            await asyncio.sleep(0)
            assert ends.by_job.keys() >= {"chat", "text"}  # before any abort can have been answered
            assert await cancelling == {"chat", "text"}
            assert set(up.abort_calls[1]) == {"chatcmpl-chat", "cmpl-text-0"}
            await running
            assert isinstance(ends.by_job["stays"], Done)
            assert isinstance(ends.by_job["chat"], Failed)
            assert isinstance(ends.by_job["chat"].error, ClientClosed)
            assert up.disconnects == 0  # the connections live on
            assert worker.cancelled_confirmed == 2
            await worker.close()

    run(scenario())


def test_a_failed_abort_closes_the_connection() -> None:
    async def deaf(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write(chunk("a"))
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        async with Upstream(deaf) as up:
            up.aborts = True
            worker, items = a_worker(up), list[Item]()
            await worker.start()
            running = asyncio.create_task(worker.run(a_plan(a_call(tokens=4000)), items.append))
            await async_until(lambda: items)
            freed = await worker.cancel(["j"])
            await running
            assert up.abort_calls[1:] == [["chatcmpl-j"]] * 3
            assert freed == {"j"}  # by the engine's metrics, once the connection was gone
            await async_until(lambda: up.disconnects == 1)
            assert isinstance(failed(items).error, ClientClosed)
            await worker.close()

    run(scenario())


def test_a_job_whose_request_was_never_sent_holds_nothing() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            up.shows_metrics = False
            worker, ends = a_worker(up), Ends()
            await worker.start()
            jobs = [a_call(f"j{n}") for n in range(9)]  # more than there are connections
            running = asyncio.create_task(worker.run(a_plan(*jobs), ends))
            await asyncio.sleep(0)
            assert await worker.cancel(["j8"]) == {"j8"}
            await running
            assert sum(isinstance(end, Done) for end in ends.by_job.values()) == 8
            await async_until(lambda: len(up.bodies) == 8)
            await worker.close()

    run(scenario())


def test_many_cancels_at_once_leave_nothing_behind() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.01)) as up:
            worker, ends = a_worker(up), Ends()
            await worker.start()
            plans = [asyncio.create_task(worker.run(a_plan(a_call(f"j{n}", tokens=4000)), ends)) for n in range(60)]
            await async_until(lambda: ends.deltas > 120)
            freed = await asyncio.gather(*(worker.cancel([f"j{n}"]) for n in range(60)))
            await asyncio.wait(plans)
            assert frozenset().union(*freed) == {f"j{n}" for n in range(60)}
            assert not up.running
            assert worker.view().load.running == 0
            assert worker.open_calls == 0
            await worker.close()

    run(scenario())


def test_mass_cancellation_yields_to_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "CANCELS_PER_YIELD", 5)

    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.01)) as up:
            worker, ends = a_worker(up), Ends()
            await worker.start()
            names = [f"j{n}" for n in range(60)]
            plans = [asyncio.create_task(worker.run(a_plan(a_call(name, tokens=4000)), ends)) for name in names]
            await async_until(lambda: ends.deltas > 120)
            cancelling = asyncio.create_task(worker.cancel(names))
            ended = [0]
            while len(ends.by_job) < len(names):
                await asyncio.sleep(0)
                ended.append(len(ends.by_job))
            assert max(after - before for before, after in itertools.pairwise(ended)) <= 2 * 5
            assert await cancelling == set(names)
            await asyncio.wait(plans)
            assert worker.open_calls == 0
            await worker.close()

    run(scenario())
