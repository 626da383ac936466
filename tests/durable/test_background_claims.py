"""Background responses of several gateways that share the database."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from durable.background_process import Process, Start, a_call, a_response, scenario
from inferry.durable import background as module
from inferry.durable.background_claims import CLAIM_TTL_S, KIND, BackgroundClaims
from inferry.durable.execute import CallAnswer


async def until_claimed(process: Process) -> None:
    """Wait until a claim is written now."""
    end = process.clock.wall() + CLAIM_TTL_S
    async with asyncio.timeout(120):
        while [one.expires_at for one in await process.documents.of_kind(KIND)] != [end]:
            await asyncio.sleep(0.001)


def test_a_response_that_another_gateway_cancels_stays_cancelled(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        running, other = start(), start()
        running.gateway.gate.clear()
        running.gateway.answers = [CallAnswer(status=503, body=b"", retry_after_s=0.0)]  # its next try is recorded
        await running.background.accept("acme", "resp_1", a_response("queued"), a_call())
        while not running.gateway.calls:
            await asyncio.sleep(0)
        assert (await other.background.cancel("acme", "resp_1")).state.status == "cancelled"
        running.gateway.gate.set()
        assert await running.until_ended() == "cancelled"
        assert len(running.gateway.calls) == 2
        assert (await other.background.cancel("acme", "resp_1")).state.status == "cancelled"
        assert not await other.documents.of_kind(module.KIND)

    scenario(tmp_path, work)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_call_of_a_response_that_another_gateway_cancels_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr(module, "WATCH_INTERVAL_S", 0.001)

    async def work(start: Start) -> None:
        running, other = start("a"), start("b")
        running.gateway.gate.clear()
        for id in ("resp_1", "resp_2"):
            await running.background.accept("acme", id, a_response("queued"), a_call(is_streamed=is_streamed))
        await other.background.cancel("acme", "resp_1")
        assert await running.until_ended() == "cancelled", "though its call never answers"
        assert running.background.is_running("acme", "resp_2")
        async with asyncio.timeout(120):
            while is_streamed and b'"status":"cancelled"' not in (
                await other.responses.events("acme", "resp_1") or b""
            ):
                await asyncio.sleep(0.001)
        running.gateway.gate.set()
        assert await running.until_ended("resp_2") == "completed"
        events = await running.responses.events("acme", "resp_2")
        assert (events is not None) == is_streamed, "its call is not stopped before its events are stored"
        await running.background.close()

    scenario(tmp_path, work)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_new_owner_leaves_a_response_to_the_live_gateway_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr(module, "WATCH_INTERVAL_S", 0.001)

    async def work(start: Start) -> None:
        running, owner = start("a"), start("b")
        running.gateway.gate.clear()
        await running.background.accept("acme", "resp_1", a_response("queued"), a_call(is_streamed=is_streamed))
        owner.background.start()
        await owner.background.poll()  # perhaps before it is claimed
        for _ in range(3):
            running.clock.advance(CLAIM_TTL_S - 1)
            await until_claimed(running)
            await owner.background.poll()
        assert not owner.gateway.calls
        running.gateway.gate.set()
        assert await running.until_ended() == "completed"
        await running.background.close()
        await owner.background.close()

    scenario(tmp_path, work)


def test_a_response_that_no_gateway_claims_is_continued_by_the_owner(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        owner = start("b")
        for id, is_streamed in (("resp_1", False), ("resp_2", True)):
            call = msgspec.json.encode(a_call(is_streamed=is_streamed))
            await owner.documents.put("acme", module.KIND, id, call, ttl_s=None)
            await owner.responses.put("acme", id, a_response("queued"))
        await BackgroundClaims(owner.documents, "killed").write([("acme", "resp_1"), ("acme", "resp_2")])
        owner.background.start()
        for _ in range(3):
            await owner.background.poll()
        assert not owner.gateway.calls
        owner.clock.advance(CLAIM_TTL_S)
        await owner.background.poll()
        assert not owner.gateway.calls, "its gateway may be about to claim it"
        await owner.background.poll()
        assert await owner.until_ended() == "completed"
        assert await owner.status("resp_2") == "failed"
        assert len(owner.gateway.calls) == 1
        assert not await owner.documents.of_kind(module.KIND)
        await owner.background.close()

    scenario(tmp_path, work)


def test_a_gateway_that_stops_leaves_its_responses_at_once(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        stopped, owner = start("a"), start("b")
        stopped.gateway.gate.clear()
        await stopped.background.accept("acme", "resp_1", a_response("queued"), a_call())
        await until_claimed(stopped)
        await stopped.background.close()
        for _ in range(2):
            await owner.background.poll()
        assert await owner.until_ended() == "completed"
        await owner.background.close()

    scenario(tmp_path, work)


def test_nothing_looks_for_ends_at_other_gateways_where_none_shares_the_database(tmp_path: Path) -> None:
    async def work(start: Start) -> None:
        process = start()
        process.gateway.gate.clear()
        await process.background.accept("acme", "resp_1", a_response("queued"), a_call())
        assert len(asyncio.all_tasks()) == 2, "this one and the call's"
        await process.background.close()

    scenario(tmp_path, work)
