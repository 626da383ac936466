"""Background responses: executed once, whatever becomes of the process that accepted them."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from durable.background_process import Start, a_call, a_response, scenario
from inferry.domain.errors import InvalidRequest, LedgerUnavailable, NotFound, StorageDisabled, TenantConcurrency
from inferry.domain.storage import StorageLimits
from inferry.durable import background as module
from inferry.durable import outages
from inferry.durable.event_log import EventLog, split_events
from inferry.durable.execute import CallAnswer
from inferry.durable.responses import MAX_CHAIN
from inferry.ledger.stores.attempts import AttemptStore
from ledger.builders import an_entry
from support.waiting import async_until


def test_an_accepted_response_is_executed_once(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        process = start()
        await process.background.accept("acme", "resp_1", a_response("queued"), a_call(headers={"x-a": "b"}))
        assert await process.until_ended() == "completed"
        (call,) = process.gateway.calls
        assert (call.tenant, call.job_id, call.lane, call.headers[b"x-a"]) == ("acme", "1-0", None, b"b")
        assert process.gateway.ledger_writes == 1
        assert not await process.documents.of_kind(module.KIND)
        await process.background.close()

    scenario(tmp_path, work)


def test_what_a_killed_process_left_runs_again_under_the_same_job_id(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        first = start()
        first.gateway.gate.clear()
        await first.background.accept("acme", "resp_1", a_response("queued"), a_call(tries=3))
        await first.background.accept("other", "resp_2", a_response("queued"), a_call(is_streamed=True))
        while len(first.gateway.calls) < 2:
            await asyncio.sleep(0)
        await first.background.close()  # no more is written than by a process that is killed
        second = start()
        second.background.start()
        assert await second.until_ended() == "completed"
        assert [call.job_id for call in second.gateway.calls] == ["1-3"] == [first.gateway.calls[0].job_id]
        assert await second.until_ended("resp_2", "other") == "failed"
        assert b"restarted" in bytes((await second.responses.get("other", "resp_2")).response)
        await second.background.close()
        third = start()
        third.background.start()
        await third.background.close()
        assert not third.gateway.calls
        assert not await third.documents.of_kind(module.KIND)

    scenario(tmp_path, work)


def test_a_charged_call_that_is_refused_after_a_restart_keeps_its_job_id(tmp_path: Path) -> None:
    """The process was killed between the row of the ledger and the result: a second id would be charged again."""

    async def work(start: Start) -> None:
        first = start()
        first.gateway.gate.clear()
        await first.background.accept("acme", "resp_1", a_response("queued"), a_call())
        while not first.gateway.calls:
            await asyncio.sleep(0)
        await first.background.close()
        with closing(AttemptStore(f"sqlite:///{tmp_path / 'ledger.db'}")) as ledger:
            ledger.append([an_entry(first.gateway.calls[0].job_id)])
        second = start()
        second.gateway.answers = [CallAnswer(status=503, body=b"", retry_after_s=0.0)]
        second.background.start()
        assert await second.until_ended() == "completed"
        assert {call.job_id for call in second.gateway.calls} == {first.gateway.calls[0].job_id}
        assert len(second.gateway.calls) == 2
        await second.background.close()

    scenario(tmp_path, work)


@pytest.mark.parametrize("read", ["of_kind", "get", "charged_jobs"])
def test_a_read_that_fails_at_the_start_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    monkeypatch.setattr(outages, "INITIAL_RETRY_S", 0.0)

    async def work(start: Start) -> None:
        process = start()
        await process.documents.put("acme", module.KIND, "resp_1", msgspec.json.encode(a_call()), ttl_s=None)
        await process.responses.put("acme", "resp_1", a_response("queued"))
        succeed, failures = getattr(process.documents, read), [LedgerUnavailable("away")] * 2

        async def fail(*args: Any) -> Any:
            if failures:
                raise failures.pop()
            return await succeed(*args)

        monkeypatch.setattr(process.documents, read, fail)
        process.background.start()
        await async_until(lambda: not failures)
        assert await process.until_ended() == "completed"
        assert len(process.gateway.calls) == 1
        await process.background.close()

    scenario(tmp_path, work)


def test_a_response_that_cannot_be_read_fails_and_later_ones_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(start: Start) -> None:
        process = start()
        call = msgspec.json.encode(a_call())
        for number, content in enumerate((b'{"body":"secret', b'{"key_id":"\xff"}', call, call), 1):
            await process.documents.put("acme", module.KIND, f"resp_{number}", content, ttl_s=None)
            await process.responses.put("acme", f"resp_{number}", a_response("queued"))
        await process.documents.put("acme", "response", "resp_3", b'{"input":"secret', ttl_s=None)
        process.background.start()
        assert await process.until_ended("resp_4") == "completed"
        assert [await process.status(f"resp_{number}") for number in (1, 2)] == ["failed", "failed"]
        assert len(process.gateway.calls) == 1
        assert not await process.documents.of_kind(module.KIND)
        await process.background.close()

    scenario(tmp_path, work)
    assert caplog.text.count("cannot be read") == 3
    assert "secret" not in caplog.text


def test_a_response_that_is_being_accepted_is_not_taken_for_one_that_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(start: Start) -> None:
        process = start()
        put = process.responses.put

        async def put_later(*args: Any) -> None:
            before = asyncio.all_tasks()
            process.background.start()
            await asyncio.wait(asyncio.all_tasks() - before)
            await put(*args)

        monkeypatch.setattr(process.responses, "put", put_later)
        await process.background.accept("acme", "resp_1", a_response("queued"), a_call())
        assert await process.until_ended() == "completed"
        assert len(process.gateway.calls) == 1
        await process.background.close()

    scenario(tmp_path, work)


def test_a_call_that_is_left_of_an_ended_response_is_not_made(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        process = start()
        for id in ("resp_1", "resp_unknown"):
            await process.documents.put("acme", module.KIND, id, msgspec.json.encode(a_call()), ttl_s=None)
        await process.responses.put("acme", "resp_1", a_response("completed"))
        process.background.start()
        async with asyncio.timeout(120):
            while await process.documents.of_kind(module.KIND):
                await asyncio.sleep(0.001)
        assert not process.gateway.calls
        await process.background.close()

    scenario(tmp_path, work)


def test_a_refused_call_is_tried_again_and_a_final_error_fails(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        process = start()
        refused = CallAnswer(status=429, body=b"", code="queue_full", retry_after_s=0.0)
        final = CallAnswer(status=400, body=b'{"error":{"message":"too long"}}', code="context_length_exceeded")
        process.gateway.answers = [refused, final]
        await process.background.accept("acme", "resp_1", a_response("queued"), a_call())
        assert await process.until_ended() == "failed"
        assert [call.job_id for call in process.gateway.calls] == ["1-0", "1-1"]
        response = msgspec.json.decode((await process.responses.get("acme", "resp_1")).response)
        assert response["error"] == {
            "code": "invalid_prompt",
            "message": "too long",
            "type": "context_length_exceeded",
        }
        await process.background.close()

    scenario(tmp_path, work)


def test_a_database_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "INITIAL_RETRY_S", 0.0)

    async def work(start: Start) -> None:
        process = start()
        process.gateway.failing_writes = 2
        await process.background.accept("acme", "resp_1", a_response("queued"), a_call())
        assert await process.until_ended() == "completed"
        assert len(process.gateway.calls) == 1
        await process.background.close()

    scenario(tmp_path, work)


def test_a_response_that_was_deleted_meanwhile_is_not_stored_again(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        process = start()
        process.gateway.gate.clear()
        await process.background.accept("acme", "resp_1", a_response("queued"), a_call())
        await process.responses.delete("acme", "resp_1")
        process.gateway.gate.set()
        async with asyncio.timeout(120):
            while process.background.is_running("acme", "resp_1"):
                await asyncio.sleep(0.001)
        with pytest.raises(NotFound):
            await process.responses.get("acme", "resp_1")
        assert not await process.documents.of_kind(module.KIND)

    scenario(tmp_path, work)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_nothing_is_stored_of_a_tenant_whose_calls_were_stopped(tmp_path: Path, is_streamed: bool) -> None:
    async def work(start: Start) -> None:
        process = start()
        process.gateway.answers = [CallAnswer(status=503, body=b"", retry_after_s=0.0)] * 1000
        for tenant in ("acme", "other"):
            call = a_call(is_streamed=is_streamed)
            await process.background.accept(tenant, "resp_1", a_response("queued"), call)
        await async_until(lambda: len(process.gateway.calls) == 4)
        await process.background.stop_tenant("acme")
        await process.documents.delete("acme", module.KIND, "resp_1")
        await process.responses.delete("acme", "resp_1")
        process.gateway.calls.clear()
        process.gateway.answers.clear()
        assert await process.until_ended("resp_1", "other") == "completed"
        assert {call.tenant for call in process.gateway.calls} == {"other"}
        assert not await process.documents.of_kind(module.KIND)
        assert {one.tenant for one in await process.documents.of_kind("response")} == {"other"}
        await process.background.close()

    scenario(tmp_path, work)


def test_a_response_older_than_a_day_fails(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        process = start()
        process.gateway.gate.clear()
        late = a_call(created_at=-2 * module.MAX_AGE_S)
        await process.background.accept("acme", "resp_1", a_response("queued"), late)
        assert await process.until_ended() == "failed"
        await process.background.close()

    scenario(tmp_path, work)


def test_a_tenant_has_a_bounded_number_of_unfinished_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNFINISHED", 2)

    async def work(start: Start) -> None:
        process = start()
        process.gateway.gate.clear()
        for number in range(2):
            await process.background.accept("acme", f"resp_{number}", a_response("queued"), a_call())
        with pytest.raises(TenantConcurrency) as refused:
            await process.background.accept("acme", "resp_2", a_response("queued"), a_call())
        assert refused.value.retry_after_s is not None
        await process.background.accept("other", "resp_2", a_response("queued"), a_call())
        await process.background.close()

    scenario(tmp_path, work)


def test_events_are_kept_for_readers_that_come_later(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        process = start()
        process.gateway.gate.clear()
        await process.background.accept("acme", "resp_1", a_response("queued"), a_call(is_streamed=True))
        event_log = process.background.event_log("acme", "resp_1")
        assert event_log is not None
        assert process.background.event_log("other", "resp_1") is None
        assert len(event_log.events) == len(module.FIRST_EVENTS)
        process.gateway.gate.set()
        assert await process.until_ended() == "completed"
        assert event_log.has_ended
        assert process.background.event_log("acme", "resp_1") is None
        assert split_events(await process.responses.events("acme", "resp_1") or b"") == event_log.events
        await process.responses.delete("acme", "resp_1")
        assert await process.responses.events("acme", "resp_1") is None
        await process.background.close()

    scenario(tmp_path, work)


def test_listeners_of_a_log_hear_of_every_change() -> None:
    event_log, heard = EventLog(), []
    event_log.listeners.add(lambda: heard.append((len(event_log.events), event_log.has_ended)))
    event_log.add(b"a\n\nb\n\n")
    event_log.end()
    assert heard == [(2, False), (2, True)]


def test_a_chain_is_bounded_and_belongs_to_its_tenant(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        responses = start().responses
        for number in range(MAX_CHAIN + 1):
            previous = f"resp_{number - 1}" if number else None
            await responses.put("acme", f"resp_{number}", a_response("completed", previous=previous))
        chain = await responses.chain("acme", f"resp_{MAX_CHAIN - 1}")
        assert [one.previous for one in chain[:2]] == [None, "resp_0"]
        assert len(chain) == MAX_CHAIN
        with pytest.raises(InvalidRequest):
            await responses.chain("acme", f"resp_{MAX_CHAIN}")
        with pytest.raises(NotFound, match="Previous response with id 'resp_0' not found"):
            await responses.chain("other", "resp_0")

    scenario(tmp_path, work)


def test_nothing_is_stored_where_storage_is_off(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        responses = start().responses
        assert not responses.is_enabled
        with pytest.raises(StorageDisabled):
            responses.require_enabled()

    scenario(tmp_path, work, StorageLimits(store="never"))
