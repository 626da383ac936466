"""A pull-worker and its gateway, without HTTP: loads in parts, results that are too large, prices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from durable.async_work import OK
from durable.queue_world import World, a_world
from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidRequest
from inferry.domain.ledger import GpuTimeRow, LedgerEntry
from inferry.domain.tenants import Tenant
from inferry.durable.execute import CallAnswer
from inferry.durable.gateway_work import GPU_TIME_ROWS, CollectedRows, GatewayWork, NoGateway
from inferry.durable.pulled_work import MAX_NUMBER, EndedWork, LoadedWork, Message, PulledWork, WorkReport
from inferry.durable.work_runner import WorkRefused
from ledger.builders import an_entry
from support.virtual_time import run_virtual

PRICES = {"far": 3, "dear": 1000}
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Message)


class Gateway:
    """The endpoint of a gateway. It raises `problem` where there is one."""

    def __init__(self, world: World, **options: Any) -> None:
        self.recorded: list[LedgerEntry | GpuTimeRow] = []
        self.messages: list[Message] = []
        self.problem: Exception | None = None
        self.pulled = PulledWork(
            world.consumers[0].source,
            ["far"],
            caller_of=lambda tenant, _: Caller(Tenant(name=tenant)),
            cost_of=lambda entry: PRICES[entry.model] * entry.output_tokens,
            record=self.recorded.append,
            **options,
        )

    async def post(self, body: bytes) -> bytes:
        if self.problem is not None:
            raise self.problem
        message = _decoder.decode(body)
        self.messages.append(message)
        return msgspec.json.encode(await self.pulled.answer(message))


@asynccontextmanager
async def a_gateway(sizes: dict[str, int], **options: Any) -> AsyncIterator[tuple[World, Gateway, GatewayWork]]:
    """With jobs whose bodies have these sizes."""
    async with a_world() as world:
        await world.consumers[0].kill()
        for id, size in sizes.items():
            world.accept(id, body=b'{"model":"far"}'.ljust(size))
        gateway = Gateway(world, **options)
        yield world, gateway, GatewayWork(gateway.post, ["far"], CollectedRows(), lambda: None)


def test_work_is_loaded_in_parts_that_fit() -> None:
    async def scenario() -> None:
        sizes = {f"job_{number:02d}": 100 for number in range(40)}
        async with a_gateway(sizes, loaded_bytes=1000) as (_, gateway, work):
            assert sorted(await work.load(sorted(sizes))) == sorted(sizes)
            answers = [await gateway.pulled.answer(message) for message in gateway.messages]
            loaded = [len(one.work) for one in answers if isinstance(one, LoadedWork)]
            assert len(loaded) >= 4
            assert max(loaded) == 10

    run_virtual(scenario())


def test_a_body_that_no_answer_holds_is_a_dead_letter_and_the_others_are_loaded() -> None:
    async def scenario() -> None:
        async with a_gateway({"job_1": 100, "job_2": 5000, "job_3": 100}, max_body_bytes=1000) as (world, _, work):
            assert sorted(await work.load(["job_1", "job_2", "job_3"])) == ["job_1", "job_3"]
            assert world.status("job_2") == "failed"
            (letter,) = await world.dead_letters.list()
            assert (letter.id, letter.reason) == ("job_2", "its body has 5000 bytes; pull-workers take 1000")

    run_virtual(scenario())


def test_a_gateway_that_hands_out_nothing_is_not_asked_for_ever() -> None:
    async def post(_: bytes) -> bytes:
        return msgspec.json.encode(LoadedWork([], left=["job_1"]))

    with pytest.raises(WorkRefused):
        asyncio.run(GatewayWork(post, ["far"], CollectedRows(), lambda: None).load(["job_1"]))


def test_a_result_above_the_gateways_limit_is_a_dead_letter_with_the_reason() -> None:
    async def scenario() -> None:
        async with a_gateway({"job_1": 100}, max_bytes=2000) as (world, gateway, work):
            loaded = await work.load(["job_1"])
            await work.finish(loaded["job_1"], CallAnswer(status=200, body=b'"%s"' % (b"x" * 3000)))
            assert world.status("job_1") == "failed"
            (letter,) = await world.dead_letters.list()
            assert letter.reason.startswith("its result cannot be reported: 4")
            assert letter.reason.endswith("bytes; the gateway accepts 2000 (server.max_body_bytes)")
            answer = msgspec.json.decode(world.jobs.answer("job_1") or b"")
            assert answer["error"]["code"] == "dead_letter"
            assert len(gateway.messages) == 2

    run_virtual(scenario())


def test_a_result_that_the_gateway_refuses_is_given_up_but_charged() -> None:
    async def scenario() -> None:
        async with a_gateway({"job_1": 100}) as (world, gateway, _):
            rows, refusals = CollectedRows(), 0

            async def post(body: bytes) -> bytes:
                nonlocal refusals
                message = _decoder.decode(body)
                if isinstance(message, WorkReport) and message.answer is not None:
                    refusals += 1
                    raise WorkRefused("the gateway answered 413")
                return await gateway.post(body)

            work = GatewayWork(post, ["far"], rows, lambda: None)
            loaded = await work.load(["job_1"])
            rows.append([an_entry("job_1-0", model="far", output_tokens=7)])
            await work.finish(loaded["job_1"], OK)
            assert refusals == 1
            assert world.status("job_1") == "failed"
            (entry,) = gateway.recorded
            assert isinstance(entry, LedgerEntry)
            assert (entry.job_id, entry.cost_nanos) == ("job_1-0", 21)

    run_virtual(scenario())


def test_a_result_is_sent_until_a_gateway_answers() -> None:
    async def scenario() -> None:
        async with a_gateway({"job_1": 100}) as (world, gateway, work):
            loaded = await work.load(["job_1"])
            gateway.problem = NoGateway("away")
            sending = asyncio.get_running_loop().create_task(work.finish(loaded["job_1"], OK))
            await asyncio.sleep(100.0)
            gateway.problem = None
            await sending
            assert world.status("job_1") == "completed"

    run_virtual(scenario())


def test_the_cost_is_that_of_the_jobs_own_model() -> None:
    async def scenario() -> None:
        async with a_gateway({"job_1": 100}) as (_, gateway, _work):
            entry = an_entry("job_1-0", model="dear", tenant="another", output_tokens=5, cost_nanos=1)
            answer = await gateway.pulled.answer(WorkReport(id="job_1", answer=OK, entries=(entry,)))
            assert answer == EndedWork([])
            (row,) = gateway.recorded
            assert isinstance(row, LedgerEntry)
            assert (row.model, row.tenant, row.cost_nanos) == ("far", "t", 15)

    run_virtual(scenario())


def test_numbers_that_no_gateway_would_write_are_not_believed() -> None:
    async def scenario() -> None:
        async with a_gateway({"job_1": 100}, wall=lambda: 5000.0) as (_, gateway, _work):
            entry = an_entry(
                "job_1-0", model="far", prompt_tokens=-1_000_000, output_tokens=10**30, total_ms=1e300, ended_at=1e300
            )
            row = GpuTimeRow(worker="w", started_at=4000.0, kind="decode", ended_at=9000.0, gpu_seconds=-1.0)
            await gateway.pulled.answer(WorkReport(id="job_1", answer=OK, entries=(entry,), gpu_time=(row,)))
            gpu_time, written = gateway.recorded
            assert isinstance(gpu_time, GpuTimeRow)
            assert (gpu_time.started_at, gpu_time.ended_at, gpu_time.gpu_seconds) == (4000.0, 5000.0, 0.0)
            assert isinstance(written, LedgerEntry)
            assert (written.prompt_tokens, written.output_tokens, written.total_ms) == (0, MAX_NUMBER, MAX_NUMBER)
            assert written.ended_at == 5000.0

    run_virtual(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        CallAnswer(status=-7, body=b"{}"),
        CallAnswer(status=600, body=b"{}"),
        CallAnswer(status=200, body=b"{}", request_id="a\0"),
        CallAnswer(status=400, body=b"{}", code="\0"),
    ],
)
def test_an_answer_that_no_call_has_is_refused(answer: CallAnswer) -> None:
    async def scenario() -> None:
        async with a_gateway({"job_1": 100}) as (world, gateway, _):
            with pytest.raises(InvalidRequest):
                await gateway.pulled.answer(WorkReport(id="job_1", answer=answer))
            assert world.status("job_1") == "in_progress"
            await gateway.pulled.answer(WorkReport(id="job_1", answer=OK))
            assert world.status("job_1") == "completed"

    run_virtual(scenario())


def test_a_number_of_tries_is_bounded() -> None:
    with pytest.raises(msgspec.ValidationError):
        _decoder.decode(b'{"do":"try","id":"job_1","tries":1099511627776}')


def test_rows_of_gpu_time_are_sent_in_parts() -> None:
    rows = CollectedRows()
    count = GPU_TIME_ROWS + 10
    rows.append_gpu_time(
        [
            GpuTimeRow(worker="w", started_at=float(at), kind="decode", ended_at=at + 1.0, gpu_seconds=1.0)
            for at in range(count)
        ]
    )
    assert [len(rows.take("job_1")[1]) for _ in range(3)] == [GPU_TIME_ROWS, 10, 0]
