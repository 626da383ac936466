"""The link between an ingress process and the owner, over real sockets in one process."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contracts.worker_calls import Received, a_call, a_plan, receive
from inferry.cluster import frames, link, owner_server
from inferry.cluster.job_fields import done_to_message, error_to_fields, fields_to_error, fields_to_job, job_to_fields
from inferry.domain.clock import SystemClock
from inferry.domain.errors import (
    ClientClosed,
    ContextLengthExceeded,
    RateLimited,
    TenantConcurrency,
    WorkerLost,
)
from inferry.domain.jobs import PooledInputs, RepeatPolicy, ResumePoint
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit
from inferry.domain.response_shapes import shape_of, with_null_fields
from inferry.domain.streams import Done, FinishReason, Item, Placed, Restarted, Usage
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.values import fields_of, replace
from inferry.domain.workers import Capacity, Phase
from inferry.workers.remote.owner_link import OwnerAddress, OwnerLink
from inferry.workers.remote.worker import RemoteWorker
from support.owner import RunningOwner, remote_worker, running_owner
from support.scripted_worker import ScriptedWorker
from support.waiting import async_until

WORDS = [f" w{number}" for number in range(400)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


def a_worker(**script: Any) -> ScriptedWorker:
    return ScriptedWorker(words=WORDS, can_resume=True, capacity=Capacity(sequences=64), **script)


@asynccontextmanager
async def linked(
    tmp_path: Path, worker: ScriptedWorker, tenants: dict[str, Tenant] | None = None
) -> AsyncIterator[tuple[RunningOwner, RemoteWorker]]:
    path = tmp_path / "owner.sock"
    async with running_owner([worker], path, tenants) as owner, remote_worker(path) as remote:
        yield owner, remote


# -- fields ----------------------------------------------------------------------------------------------------------


def test_a_job_is_the_same_on_the_other_side() -> None:
    job = replace(
        a_call("j", resume_point=ResumePoint((1, 2), (3,), unsent="x", tail=None)),
        deadline=110.0,
        arrived_at=90.0,
        repeat=RepeatPolicy("run step", keep=True, linger_s=1.5),
        prefix=("a", "b"),
        max_kv_tokens=7,
        run_kv_quota=("root", 5),
        ttft_allowance_s=2.5,
        key_id="key",
        parent_run="parent",
        is_batch=True,
    )
    job = replace(job, payload=replace(job.payload, pooled=PooledInputs(2, ((1,), (2,)), ((0, 1),), 3)))
    sent = frames.decode_frame(frames.encode_frame([frames.Submit(1, False, job_to_fields(job, 100.0))])[4:])[0]
    assert isinstance(sent, frames.Submit)
    there = fields_to_job(sent.job, 1000.0)
    assert (there.arrived_at, there.deadline) == (990.0, 1010.0)
    here = replace(job, arrived_at=990.0, deadline=1010.0, payload=replace(job.payload, keeps_ids=True))
    assert fields_of(there) == fields_of(here)


def test_the_shape_of_an_answer_is_sent_with_whole_answers() -> None:
    answer = {"id": "x", "choices": [{"text": "a", "logprobs": None}], "usage": None}
    done = Done("j", FinishReason.STOP, Usage(1, 0, 2), b"raw", stop_reason=7, shape=shape_of(answer))
    whole, streamed = (
        frames.decode_frame(frames.encode_frame([done_to_message(1, done, is_streamed=streamed)])[4:])[0]
        for streamed in (False, True)
    )
    assert isinstance(whole, frames.Finish)
    assert whole.shape is not None
    assembled = {"id": "y", "choices": [{"text": "b"}]}
    completed = {"id": "y", "choices": [{"text": "b", "logprobs": None}], "usage": None}
    assert with_null_fields(assembled, whole.shape) == completed
    assert isinstance(streamed, frames.Finish)
    assert streamed.shape is None


def test_a_message_that_cannot_be_sent_ends_the_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(tmp_path, a_worker()) as (_, remote):
            connection = remote.link._connection
            assert connection is not None
            connection.send(frames.Cancel(1, [object()]))  # type: ignore[list-item]
            await async_until(lambda: connection.is_lost)
            await async_until(lambda: remote.view().phase is Phase.READY)

    run(scenario())


def test_workers_that_lost_a_job_here_mean_nothing_to_the_owner() -> None:
    job = a_call("j")
    avoiding = replace(job, route=replace(job.route, avoid=("owner",)))
    assert job_to_fields(avoiding, 0.0).route == job.route


def test_an_error_is_the_same_on_the_other_side() -> None:
    limited = RateLimited("too many", param="p", retry_after_s=2.5)
    limited.has_own_retry_time, limited.predicted_wait_s = True, 1.5
    long = ContextLengthExceeded("too long").with_tokens(5, None, 4)
    for error in (limited, long):
        found = fields_to_error(error_to_fields(error))
        assert type(found) is type(error)
        assert error_to_fields(found) == error_to_fields(error)
        assert (found.retry_after_s, found.param) == (error.retry_after_s, error.param)
    lost = WorkerLost("x")
    assert lost.can_failover
    assert not fields_to_error(error_to_fields(lost)).can_failover  # the owner has retried what it could
    unknown = frames.ErrorFields("NoSuchError", "x", None, None, None, False)
    assert fields_to_error(unknown).status == 500


# -- admission -------------------------------------------------------------------------------------------------------


def test_the_owner_admits_the_jobs_of_all_ingress_processes(tmp_path: Path) -> None:
    tenants = {"a": Tenant(name="a", limits=Limits(max_concurrent=3))}

    async def scenario() -> None:
        worker = a_worker()
        async with linked(tmp_path, worker, tenants) as (owner, first), remote_worker(owner.path) as second:
            worker.gate.clear()
            received = Received()
            running = [
                asyncio.create_task(remote.run(a_plan(remote, a_call(f"{name}{i}", tokens=begin + i)), received))
                for name, remote, begin in (("x", first, 2), ("y", second, 8))
                for i in range(4)
            ]
            await async_until(lambda: len(received.ends) == 5)
            assert all(isinstance(received.failed(job).error, TenantConcurrency) for job in received.ends)
            assert worker.running == 3
            worker.gate.set()
            await asyncio.gather(*running)
            assert sum(isinstance(end, Done) for end in received.ends.values()) == 3

    run(scenario())


def test_a_job_that_the_ingress_has_admitted_is_not_admitted_again(tmp_path: Path) -> None:
    tenants = {"a": Tenant(name="a", limits=Limits(max_concurrent=0))}

    async def scenario() -> None:
        async with linked(tmp_path, a_worker(), tenants) as (owner, remote):
            refused = await receive(remote, a_call("j"))
            assert isinstance(refused.failed("j").error, TenantConcurrency)
            admitting = OwnerLink(OwnerAddress(owner.path), SystemClock(), admits_here=True)
            admitting.start()
            await admitting.wait_connected()
            served = RemoteWorker("owner", admitting, remote.served, SystemClock())
            assert isinstance((await receive(served, a_call("k"))).ends["k"], Done)
            await admitting.close()
            assert isinstance((await receive(remote, replace(a_call("l"), tenant="b"))).ends["l"], Done)
            await async_until(lambda: len(owner.ledger.entries) > 0)
            assert [entry.job_id for entry in owner.ledger.entries] == ["l"]  # the ingress process records "k"

    run(scenario())


# -- output ----------------------------------------------------------------------------------------------------------


class Items(list[Item]):
    def __call__(self, item: Item) -> None:
        self.append(item)


def test_a_job_is_told_where_it_runs_before_its_first_piece(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(tmp_path, a_worker()) as (_, remote):
            items = Items()
            await remote.run(a_plan(remote, a_call("j")), items)
            placed = items[0]
            assert isinstance(placed, Placed)
            assert (placed.worker, placed.batch_size) == ("scripted", 1)
            assert sum(isinstance(item, Placed) for item in items) == 1

    run(scenario())


class DyingOnce(ScriptedWorker):
    """Loses the first job after some words."""

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        await super().run(plan, emit)
        if plan.plan_id:
            self.dies_after = None


def test_an_attempt_that_the_owner_resumes_continues_the_output(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = DyingOnce(words=WORDS, can_resume=True, capacity=Capacity(sequences=64))
        async with linked(tmp_path, worker) as (_, remote):
            items = Items()
            worker.dies_after = 5
            job = replace(a_call("j", tokens=12), stream=True)
            await remote.run(a_plan(remote, job), items)
            restarted = next(item for item in items if isinstance(item, Restarted))
            assert restarted.attempt == 2
            assert restarted.resume_point is not None
            assert restarted.resume_point.output_ids == tuple(range(5))
            text = "".join(item.text for item in items if hasattr(item, "text"))
            assert text == "".join(WORDS[:12])
            done = items[-1]
            assert isinstance(done, Done)
            assert done.usage.output_tokens == 7  # of the resumed attempt, as of any worker

    run(scenario())


def test_output_that_an_ingress_process_does_not_read_is_merged_and_then_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_server, "MAX_UNREAD_BYTES", 50_000)
    monkeypatch.setattr(link, "WRITE_BUFFER_BYTES", 10_000)

    async def scenario() -> None:
        words = [" word" * 400] * 2000
        worker = ScriptedWorker(words=words, capacity=Capacity(sequences=64))
        async with linked(tmp_path, worker) as (owner, remote):
            transport = remote.link._connection._transport  # type: ignore[union-attr]
            assert transport is not None
            transport.pause_reading()
            received = Received()
            running = asyncio.create_task(remote.run(a_plan(remote, a_call("j", tokens=2000)), received))
            await async_until(lambda: worker.cancelled == ["j"])
            transport.resume_reading()
            await running
            assert isinstance(received.failed("j").error, ClientClosed)
            assert len(received.deltas["j"]) < 1000
            assert owner.server.jobs == 0

    run(scenario())


# -- losses ----------------------------------------------------------------------------------------------------------


def test_the_jobs_of_a_lost_ingress_process_are_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = a_worker()
        async with linked(tmp_path, worker) as (owner, remote):
            received = Received()
            worker.pause_s = 0.001
            jobs = [a_call(f"j{i}", tokens=300) for i in range(5)]
            running = asyncio.create_task(remote.run(a_plan(remote, *jobs), received))
            await received.first.wait()
            connection = remote.link._connection
            assert connection is not None
            connection.abort()
            await running
            assert all(isinstance(received.failed(job.job_id).error, WorkerLost) for job in jobs)
            await async_until(lambda: worker.running == 0 and owner.gateway.in_flight == 0)
            await async_until(lambda: len(owner.ledger.entries) == 5)
            assert {entry.error_code for entry in owner.ledger.entries} == {"client_closed"}

    run(scenario())


def test_a_job_is_offered_again_while_its_cancel_is_not_confirmed(tmp_path: Path) -> None:
    class SlowCancel(ScriptedWorker):
        async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
            await may_cancel.wait()
            return await super().cancel(job_ids)

    may_cancel = asyncio.Event()

    async def scenario() -> None:
        worker = SlowCancel(words=WORDS, can_resume=True, capacity=Capacity(sequences=64))
        async with linked(tmp_path, worker) as (owner, remote):
            for number in range(3):
                worker.gate.clear()
                running = asyncio.create_task(remote.run(a_plan(remote, a_call("j", tokens=300)), Received()))
                await async_until(lambda number=number: worker.running == number + 1)  # type: ignore[misc]
                connection = remote.link._connection
                assert connection is not None
                connection.abort()
                await running
                await async_until(lambda: remote.view().phase is Phase.READY)
            again = asyncio.create_task(receive(remote, a_call("j", tokens=300)))
            await async_until(lambda: worker.running == 4)
            worker.gate.set()
            assert isinstance((await again).ends["j"], Done)
            may_cancel.set()
            await async_until(lambda: worker.running == 0 and owner.gateway.in_flight == 0)

    run(scenario())


def test_a_job_without_a_connection_has_not_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(tmp_path, a_worker()) as (owner, remote):
            await owner.stop()
            await async_until(lambda: remote.view().phase is Phase.DOWN)
            failed = (await receive(remote, a_call("j"))).failed("j")
            assert failed.error.can_failover
            assert (await remote.cancel(["j"])) == frozenset()
            assert remote.view().models == {"m"}
            await owner.listen()
            await async_until(lambda: remote.view().phase is Phase.READY)
            assert isinstance((await receive(remote, a_call("k"))).ends["k"], Done)

    run(scenario())


def test_a_silent_peer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with linked(tmp_path, a_worker()) as (_, remote):
            connection = remote.link._connection
            assert connection is not None
            monkeypatch.setattr(link, "SILENCE_TIMEOUT_S", -1.0)
            connection._beat()
            monkeypatch.undo()
            await async_until(lambda: connection.is_lost)
            await async_until(lambda: remote.view().phase is Phase.READY)

    run(scenario())
