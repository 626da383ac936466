"""A consumer of the work queue while the queue, the database or its gateway is slow, away or refuses."""

import asyncio
from typing import Any

import pytest

from durable.async_work import OK, until
from durable.queue_world import a_world
from inferry.domain.storage import Batch, BatchDetail, BatchItem, item_id
from inferry.domain.work_queue import MAX_DELIVERIES, NewWork
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.durable.work_runner import RenewalStreak, WorkRefused
from support.virtual_time import LoopClock, run_virtual


def test_a_slow_load_stops_no_renewal() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            holder, answer = world.consumers[0], asyncio.get_running_loop().create_future()
            holder.execute.script = lambda call: answer if call.job_id == "job_1-0" else OK
            world.accept("job_1")
            await until(lambda: bool(holder.execute.calls))
            doomed = world.consumer("doomed", lambda _: asyncio.get_running_loop().create_future())
            loads, is_back = holder.source.load, asyncio.Event()

            async def slow_load(ids: Any) -> Any:
                await is_back.wait()
                return await loads(ids)

            holder.source.load = slow_load  # type: ignore[method-assign]
            holder.source.ended = slow_load  # type: ignore[method-assign]
            holder.runner._lanes = {"P0": 0, "P2": 0}  # what follows is for the doomed consumer
            world.accept("job_2")
            await until(lambda: bool(doomed.execute.calls))
            await doomed.kill()
            holder.runner._lanes = {"P0": 4, "P2": 4}
            await until(lambda: holder.runner.deliveries["claimed"] == 1)  # and its load does not return
            other = world.consumer("other")
            await asyncio.sleep(60.0)
            assert other.execute.calls == []
            is_back.set()
            answer.set_result(OK)
            await until(lambda: {world.status("job_1"), world.status("job_2")} == {"completed"})
            assert holder.execute.job_ids == ["job_1-0", "job_2-0"]

    run_virtual(scenario())


@pytest.mark.parametrize("sweeps", [True, False])
def test_a_job_that_is_accepted_while_the_queue_is_away_does_not_wait_for_a_sweep(sweeps: bool) -> None:
    async def scenario() -> None:
        async with a_world() as world:
            await asyncio.sleep(1.0)  # the first sweep is over, the next one is nine seconds away
            if not sweeps:
                await world.swept.close()
            world.queue.is_up = False
            world.accept("job_1")
            await asyncio.sleep(2.0)
            world.queue.is_up = True
            await asyncio.sleep(3.0)
            assert world.status("job_1") == "completed"

    run_virtual(scenario())


def test_work_in_progress_is_not_claimed_when_the_queue_comes_back_after_a_pause() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            answers: dict[str, asyncio.Future[CallAnswer]] = {}

            def script(call: StoredCall) -> asyncio.Future[CallAnswer]:
                return answers.setdefault(call.job_id, asyncio.get_running_loop().create_future())

            world.consumers[0].execute.script = script
            for name in ("one", "two"):
                await asyncio.sleep(0.4)  # their renewals are apart
                world.consumer(name, script)
            for number in range(6):  # the consumers have free places
                world.accept(f"job_{number}")
            await until(lambda: len(answers) == 6)
            await asyncio.sleep(20.0)
            world.queue.is_up = False
            await asyncio.sleep(30.0)
            world.queue.is_up = True
            await asyncio.sleep(60.0)
            for answer in answers.values():
                answer.set_result(OK)
            await until(lambda: all(world.status(f"job_{number}") == "completed" for number in range(6)))
            assert sum(len(one.execute.calls) for one in world.consumers) == 6
            assert [one.runner.deliveries["claimed"] for one in world.consumers] == [0, 0, 0]

    run_virtual(scenario())


def test_a_streak_of_renewals_begins_again_after_a_failure_and_after_a_gap() -> None:
    streak = RenewalStreak(6.0)
    assert not streak.is_complete(100.0)
    for now in range(100, 107):
        streak.succeeded(float(now))
    assert streak.is_complete(106.0)
    assert not streak.is_complete(110.0)  # the next renewal is overdue
    streak.succeeded(110.0)
    assert not streak.is_complete(110.0)
    for now in range(111, 117):
        streak.succeeded(float(now))
    assert streak.is_complete(116.0)
    streak.failed()
    streak.succeeded(117.0)
    assert not streak.is_complete(117.0)


def test_the_result_of_an_item_waits_for_the_database() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            batch = Batch(
                id="batch_1",
                tenant="t",
                key_id=None,
                api="openai",
                status="in_progress",
                endpoint="/v1/chat/completions",
                created_at=LoopClock().wall(),
                deadline=LoopClock().wall() + 86_400.0,
                detail=BatchDetail(),
                total=1,
            )
            world.batches.create(batch, [BatchItem(1, "c", b"{}")], None)
            await world.queue.add([NewWork(item_id("batch_1", 1), "P2", "", "t")])
            holder, answer = world.consumers[0], asyncio.get_running_loop().create_future()
            holder.execute.script = lambda _: answer
            await until(lambda: bool(holder.execute.calls))
            reads, read = 0, world.batches.load_items

            def failing(wanted: Any) -> Any:
                nonlocal reads
                reads += 1
                if reads <= 5:
                    raise ConnectionError("the database is away")
                return read(wanted)

            world.batches.load_items = failing  # type: ignore[method-assign]
            answer.set_result(OK)
            await until(lambda: world.batches.outcome_counts("batch_1") == {"succeeded": 1})
            assert holder.execute.job_ids == ["batch_1-1-0"]
            await until(lambda: not world.queue.ids)

    run_virtual(scenario())


def test_work_that_cannot_be_loaded_at_all_is_let_go_and_given_up() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            await world.consumers[0].runner.close()  # it serves other models
            refusing = world.consumer("refusing", give_up=None)

            async def refuse(ids: Any) -> Any:
                raise WorkRefused("too large")

            refusing.source.load = refuse  # type: ignore[method-assign]
            world.accept("job_1")
            await until(lambda: refusing.runner.deliveries["claimed"] == MAX_DELIVERIES - 1)
            assert refusing.runner.in_flight == 0
            world.consumer("gateway")
            await until(lambda: world.status("job_1") == "failed")
            (letter,) = await world.dead_letters.list()
            assert letter.reason == "delivered 5 times without a result; the last holder was refusing"

    run_virtual(scenario())


def test_a_loop_goes_on_after_an_unexpected_error() -> None:
    async def scenario() -> None:
        async with a_world() as world:
            take, failures = world.queue.take, iter([ValueError("not msgpack")])

            async def broken(consumer: Any, wanted: Any) -> Any:
                for error in failures:
                    raise error
                return await take(consumer, wanted)

            world.queue.take = broken  # type: ignore[method-assign]
            world.accept("job_1")
            await until(lambda: world.status("job_1") == "completed")

    run_virtual(scenario())
