"""Consumers of the work queue in virtual time: every job ends once, whatever is killed, paused or lost."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from durable.async_work import OK, a_job, until
from durable.queue_world import World, a_world
from inferry.domain.work_queue import MAX_DELIVERIES, NewWork
from inferry.durable.execute import CallAnswer, StoredCall
from support.virtual_time import LoopClock, run_virtual

REFUSED = CallAnswer(status=429, body=b"{}", retry_after_s=20.0)


def test_a_job_is_acknowledged_after_its_result_is_stored() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            for tenant in ("a", "b"):  # their entries have the same numbers
                world.accept(f"job_{tenant}", tenant)
            await until(lambda: {world.status(f"job_{tenant}", tenant) for tenant in ("a", "b")} == {"completed"})
            await until(lambda: not world.queue.ids)
            assert world.jobs.answer("job_a") == OK.body
            assert world.consumers[0].runner.deliveries == {"taken": 2, "done": 2}
            assert world.consumers[0].source.ended_jobs == {"completed": 2}

    run_virtual(scenario())


def test_a_job_of_a_killed_consumer_is_claimed_and_charged_under_the_same_id() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            await world.consumers[0].kill()
            doomed = world.consumer("doomed", lambda _: asyncio.get_running_loop().create_future())
            world.accept("job_1")
            await until(lambda: bool(doomed.execute.calls))
            await doomed.kill()
            other = world.consumer("other")
            await until(lambda: world.status("job_1") == "completed")
            assert other.execute.job_ids == doomed.execute.job_ids == ["job_1-0"]

    run_virtual(scenario())


def test_a_paused_holder_stores_no_second_result() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            paused = world.consumers[0]
            late: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
            paused.execute.script = lambda _: late
            world.accept("job_1")
            await until(lambda: bool(paused.execute.calls))
            for loop in paused.runner._loops:
                loop.cancel()
            world.consumer("other", lambda _: CallAnswer(status=200, body=b'{"by":"other"}'))
            await until(lambda: world.status("job_1") == "completed")
            late.set_result(CallAnswer(status=200, body=b'{"by":"paused"}'))
            await asyncio.sleep(10.0)
            assert world.jobs.answer("job_1") == b'{"by":"other"}'

    run_virtual(scenario())


def test_work_that_a_queue_without_its_data_delivers_again_goes_on_where_it_runs() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            holder = world.consumers[0]
            answer: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
            holder.execute.script = lambda _: answer
            world.accept("job_1")
            await until(lambda: bool(holder.execute.calls))
            world.queue.lose()
            await world.swept.sweep()
            await until(lambda: holder.runner.deliveries["taken"] == 2)
            await asyncio.sleep(1.0)
            assert holder.execute.job_ids == ["job_1-0"]
            assert (len(holder.runner._held), sum(holder.runner._running.values())) == (1, 1)
            answer.set_result(OK)
            await until(lambda: not world.queue.ids)
            assert (world.status("job_1"), holder.runner._held) == ("completed", {})
            assert not sum(holder.runner._running.values())

    run_virtual(scenario())


def test_a_job_that_breaks_every_consumer_is_a_dead_letter_with_a_reason() -> None:
    async def scenario() -> None:
        async with a_world() as world:

            def broken(_: StoredCall) -> CallAnswer:
                raise RuntimeError("the prompt must not be quoted")

            world.consumers[0].execute.script = broken
            world.accept("job_1")
            await until(lambda: world.status("job_1") == "failed")
            assert len(world.consumers[0].execute.calls) == MAX_DELIVERIES
            (letter,) = await world.dead_letters.list()
            assert (letter.id, letter.tenant, letter.deliveries) == ("job_1", "t", MAX_DELIVERIES)
            assert letter.reason == "delivered 5 times without a result; the last holder was owner"
            assert b'"code":"dead_letter"' in (world.jobs.answer("job_1") or b"")
            await until(lambda: not world.queue.ids)

    run_virtual(scenario())


def test_refused_jobs_of_one_tenant_hold_no_place_of_another() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            refuse = {"is_on": True}

            def script(call: StoredCall) -> CallAnswer:
                return REFUSED if call.tenant == "t" and refuse["is_on"] else OK

            world.consumers[0].execute.script = script
            for number in range(20):
                world.accept(f"job_{number}")
            await asyncio.sleep(5.0)
            taken = len(world.consumers[0].execute.calls)
            assert taken <= 8  # the stream is not read while its items wait
            job = a_job("job_other", tenant="other", deadline=LoopClock().wall() + 60.0)
            world.jobs.create(job, b"{}", None, None)
            world.swept.add(job)
            await asyncio.sleep(5.0)
            found = world.jobs.get("other", "job_other", 0.0)
            assert found is not None
            assert found.status == "completed"
            refuse["is_on"] = False
            await until(lambda: all(world.status(f"job_{number}") == "completed" for number in range(20)))

    run_virtual(scenario())


def test_a_job_that_was_cancelled_elsewhere_is_stopped() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            holder = world.consumers[0]
            holder.execute.script = lambda _: asyncio.get_running_loop().create_future()
            world.accept("job_1")
            await until(lambda: bool(holder.execute.calls))
            world.jobs.end(holder.source.end_of("job_1", "cancelled"))
            await until(lambda: holder.execute.cancelled == ["job_1-0"])
            await until(lambda: not world.queue.ids)

    run_virtual(scenario())


def test_a_consumer_that_drains_finishes_its_work_and_puts_back_the_rest() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            await world.consumers[0].runner.close()
            slow: dict[str, asyncio.Future[CallAnswer]] = {}

            def script(call: StoredCall) -> asyncio.Future[CallAnswer]:
                return slow.setdefault(call.job_id, asyncio.get_running_loop().create_future())

            draining = world.consumer("draining", script)
            world.accept("job_1")
            world.accept("job_2")
            await until(lambda: len(slow) == 2)
            asyncio.get_running_loop().call_later(5.0, slow["job_1-0"].set_result, OK)
            await draining.runner.close(drain_s=20.0)
            assert (world.status("job_1"), world.status("job_2")) == ("completed", "in_progress")
            other = world.consumer("other")
            await until(lambda: world.status("job_2") == "completed", 5.0 + 1.0)
            assert other.execute.job_ids == ["job_2-0"]

    run_virtual(scenario())


def _answer(future: asyncio.Future[CallAnswer]) -> None:
    if not future.done():
        future.set_result(OK)


@pytest.mark.parametrize("seed", range(40))
def test_every_job_ends_once_whatever_is_killed_or_lost(seed: int) -> None:
    rng = random.Random(seed)
    stored: Counter[str] = Counter()

    async def trouble(world: World) -> None:
        for number in range(12):
            await asyncio.sleep(rng.uniform(0.0, 8.0))
            match rng.choice(["kill", "lose", "away", "start"]):
                case "kill" if len(world.consumers) > 1:
                    await world.consumers.pop(rng.randrange(1, len(world.consumers))).kill()
                case "lose":
                    world.queue.lose()
                case "away":
                    world.queue.is_up = False
                    await asyncio.sleep(rng.uniform(0.0, 10.0))
                    world.queue.is_up = True
                case _:
                    world.consumer(f"consumer-{number}", script)

    def script(_: StoredCall) -> CallAnswer | asyncio.Future[CallAnswer]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CallAnswer] = loop.create_future()
        loop.call_later(rng.uniform(0.0, 6.0), _answer, future)
        return future

    async def scenario() -> None:
        async with a_world() as world:
            world.consumers[0].execute.script = script
            write = world.jobs.record

            def record(records: Any) -> None:
                is_open = world.jobs.open_ids([one.id for one in records])
                write(records)
                stored.update(is_open - world.jobs.open_ids([one.id for one in records]))

            world.jobs.record = record  # type: ignore[method-assign]
            going = asyncio.get_running_loop().create_task(trouble(world))
            names = {f"job_{number}": f"tenant-{number % 3}" for number in range(30)}
            for name, tenant in names.items():
                world.accept(name, tenant)
                await asyncio.sleep(rng.uniform(0.0, 1.0))
            await going
            await until(lambda: all(world.status(*name) == "completed" for name in names.items()))
            assert stored == dict.fromkeys(names, 1)
            await until(lambda: not world.queue.ids)

    run_virtual(scenario())


def test_while_the_queue_does_not_answer_few_jobs_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inferry.durable.queued_jobs.MAX_ADDING", 12)

    async def scenario() -> None:
        async with a_world() as world:
            answers, add = asyncio.Event(), world.queue.add
            asked = 0

            async def silent(work: Sequence[NewWork]) -> int:
                nonlocal asked
                asked += len(work)
                await answers.wait()
                return await add(work)

            monkeypatch.setattr(world.queue, "add", silent)
            for number in range(50):
                world.accept(f"job-{number}")
            await asyncio.sleep(0)
            assert asked <= 12
            answers.set()

    run_virtual(scenario())
