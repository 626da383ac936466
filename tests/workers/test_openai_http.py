"""The HTTP worker against a misbehaving server."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.errors import GatewayError
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Item
from inferry.workers.http_client import DISCARD_TIMEOUT_S
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.sse import EventScanner
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support import upstream
from support.builders import a_job
from support.upstream import DONE, Script, Upstream, begin, chunk, event, role, usage
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


async def ran(up: Upstream, **settings: Any) -> tuple[OpenAIHttpWorker, list[Item]]:
    """A worker before the server, and what one job on it emitted."""
    worker = OpenAIHttpWorker("up", HttpWorkerSettings(url=up.url, **settings), LoopClock())
    items: list[Item] = []
    await worker.start()
    job = a_job("j", body=BODY)
    plan = BatchPlan(plan_id=1, worker="up", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
    await worker.run(plan, items.append)
    return worker, items


async def call(up: Upstream, **settings: Any) -> list[Item]:
    """One job against the server, from start to close."""
    worker, items = await ran(up, **settings)
    await worker.close()
    return items


def against(script: Script, **settings: Any) -> list[Item]:
    async def scenario() -> list[Item]:
        async with Upstream(script) as up:
            return await call(up, **settings)

    return run_virtual_net(asyncio.wait_for(scenario(), 120))


def run(work: Coroutine[Any, Any, None]) -> None:
    run_virtual_net(asyncio.wait_for(work, 120))


def says(*pieces: bytes) -> Script:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return script


def failure(items: list[Item]) -> GatewayError:
    end = items[-1]
    assert isinstance(end, Failed), end
    return end.error


def test_events_pass_through_as_they_came() -> None:
    events = [role(), chunk("Hel"), chunk("lo", "stop")]
    items = against(says(*events, usage(9, 2), DONE))
    assert b"".join(item.raw for item in items if isinstance(item, Delta)) == b"".join(events)
    end = items[-1]
    assert isinstance(end, Done)
    assert (end.finish, end.usage.prompt_tokens, end.usage.output_tokens) == (FinishReason.STOP, 9, 2)
    assert end.raw == usage(9, 2)


def test_the_opening_role_is_not_a_token() -> None:
    items = against(says(role(), chunk("a"), chunk("b", "length"), usage(1, 2), DONE))
    assert sum(item.tokens for item in items if isinstance(item, Delta)) == 2


def test_an_in_band_error_before_done_is_a_failure() -> None:
    broken = event({"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError"}})
    items = against(says(chunk("a"), broken, DONE))
    assert failure(items).code == "worker_lost"
    assert b"error" not in b"".join(item.raw for item in items if isinstance(item, Delta))


def test_an_abort_never_looks_like_a_normal_end() -> None:
    items = against(says(chunk("a"), chunk("", "abort"), usage(1, 1), DONE))
    assert failure(items).code == "worker_lost"
    assert b"abort" not in b"".join(item.raw for item in items if isinstance(item, Delta))


def test_done_without_a_finish_reason_is_not_success() -> None:
    assert failure(against(says(chunk("a"), DONE))).code == "worker_lost"


def test_a_body_that_ends_in_the_middle_of_an_event_is_a_failure() -> None:
    assert failure(against(says(chunk("a"), b'data: {"choices":[{"ind'))).code == "worker_lost"


def test_a_connection_that_breaks_mid_stream_is_a_failure() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk("a"))
        assert request.transport is not None
        request.transport.close()
        return response

    items = against(script)
    assert failure(items).code == "worker_lost"
    end = items[-1]
    assert isinstance(end, Failed)
    assert end.usage.output_tokens == 1


def test_silence_with_an_open_connection_times_out() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk("a"))
        await up.release.wait()
        return response

    assert failure(against(script, first_token_timeout_s=0.2)).code == "worker_timeout"


def test_a_server_that_leaves_its_connection_open_after_done_does_not_keep_the_job_waiting() -> None:
    async def linger_timer(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk("a") + chunk("b", "stop") + usage(1, 2) + DONE)
        await up.release.wait()
        return response

    async def scenario() -> None:
        async with Upstream(linger_timer) as up:
            async with asyncio.timeout(0.9 * DISCARD_TIMEOUT_S):
                worker, items = await ran(up)
            assert isinstance(items[-1], Done)
            await up.gone.wait()  # the connection is given up a little later
            await worker.close()

    run(scenario())


def test_done_after_an_error_is_not_success_even_where_the_connection_stays_open() -> None:
    async def linger_timer(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk("a") + event({"error": {"message": "boom"}}) + DONE)
        await up.release.wait()
        return response

    assert failure(against(linger_timer)).code == "worker_lost"


@pytest.mark.parametrize("says_tokens", [True, False])
def test_an_endless_stream_is_cut_off(says_tokens: bool) -> None:
    async def forever(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write((chunk("a") if says_tokens else b": still here\n\n") * 100)

    async def scenario() -> None:
        async with Upstream(forever) as up:
            worker, items = await ran(up)
            assert failure(items).code == "worker_lost"
            # It is stopped with the read that goes too far, and asyncio reads at most 256 KiB at once.
            a_read = 2**18 // len(chunk("a"))
            assert sum(item.tokens for item in items if isinstance(item, Delta)) <= 2 * a_read
            await up.gone.wait()
            await worker.close()

    run(scenario())


def test_an_answer_of_exactly_the_tokens_asked_for_is_not_too_long() -> None:
    budget = a_job(body=BODY).token_budget
    pieces = chunk("a") * (budget - 1) + chunk("b", "length")
    assert isinstance(against(says(pieces, usage(1, budget), DONE))[-1], Done)


def test_an_error_of_the_sink_reaches_the_caller_of_run() -> None:
    def emit(item: Item) -> None:
        raise RuntimeError("full")

    async def scenario() -> None:
        async with Upstream() as up:
            worker = OpenAIHttpWorker("up", HttpWorkerSettings(url=up.url), LoopClock())
            await worker.start()
            plan = BatchPlan(
                plan_id=1, worker="up", jobs=(a_job("j", body=BODY),), reason=ReleaseReason.IMMEDIATE, formed_at=0.0
            )
            with pytest.raises(RuntimeError, match="full"):
                await worker.run(plan, emit)
            assert worker.view().load.running == 0
            await worker.close()

    run(scenario())


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (400, "temperature must be non-negative", "invalid_request"),
        (400, "This model's maximum context length is 4096 tokens.", "context_length_exceeded"),
        (404, "The model does not exist.", "model_not_found"),
        (503, "queue full", "no_worker"),
        (429, "slow down", "no_worker"),
        (401, "wrong key", "worker_lost"),
        (500, "boom", "worker_lost"),
    ],
)
def test_a_refusal_is_mapped_to_the_gateways_own_table(status: int, message: str, code: str) -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    error = failure(against(script))
    assert error.code == code
    assert (message in error.message) == (status == 400)


def test_events_cut_anywhere_by_the_network_are_put_together() -> None:
    whole = role() + chunk("Hé") + chunk("llo", "stop") + usage(3, 2) + DONE

    async def drip(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for at in range(0, len(whole), 7):
            await response.write(whole[at : at + 7])
            await asyncio.sleep(0)
        return response

    items = against(drip)
    assert isinstance(items[-1], Done)
    assert b"".join(i.raw for i in items if isinstance(i, Delta)) == role() + chunk("Hé") + chunk("llo", "stop")


def test_carriage_returns_and_comments_do_not_confuse_it() -> None:
    lines = (b": ping\n\n" + chunk("a") + chunk("b", "stop") + usage(1, 2) + DONE).replace(b"\n", b"\r\n")
    items = against(says(lines))
    assert isinstance(items[-1], Done)
    assert b"".join(i.raw for i in items if isinstance(i, Delta)) == chunk("a") + chunk("b", "stop")


def test_json_with_spaces_is_understood_too() -> None:
    spaced = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}\n\n'
    items = against(says(spaced, chunk("y", "stop"), usage(1, 2), DONE))
    assert isinstance(items[-1], Done)
    assert sum(i.tokens for i in items if isinstance(i, Delta)) == 2


def test_a_client_that_asked_for_no_usage_is_counted_all_the_same() -> None:
    end = against(says(chunk("a"), chunk("b", "length"), DONE))[-1]
    assert isinstance(end, Done)
    assert end.usage.output_tokens == 2


def test_generated_text_cannot_end_its_stream() -> None:
    said = '"finish_reason":"stop"}]} data: [DONE] {"error":'
    items = against(says(chunk(said), chunk("b", "length"), usage(1, 2), DONE))
    end = items[-1]
    assert isinstance(end, Done)
    assert end.finish is FinishReason.LENGTH


def test_the_upstream_gets_its_own_key_and_the_body_streamed() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            await call(up, api_key="upstream-secret")
            assert up.headers[0]["authorization"] == "Bearer upstream-secret"
            assert up.headers[0]["x-request-id"] == "j"
            assert up.bodies[0]["stream"] is True
            assert up.bodies[0]["stream_options"] == {"include_usage": True}

    run(scenario())


@pytest.mark.parametrize(("lane", "priority"), [(Lane.P0, -1), (Lane.P1, 0), (Lane.P2, 1)])
def test_a_server_with_priority_scheduling_is_sent_the_lane_not_the_clients_priority(lane: Lane, priority: int) -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            worker = OpenAIHttpWorker("up", HttpWorkerSettings(url=up.url, wants_priorities=True), LoopClock())
            await worker.start()
            for body in (BODY, BODY[:-1] + b',"priority":-99}', BODY[:-1] + b',"priority":-99,"stream_options":null}'):
                job = a_job("j", body=body, lane=lane)
                plan = BatchPlan(plan_id=1, worker="up", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
                await worker.run(plan, lambda item: None)
            assert [body["priority"] for body in up.bodies] == [priority] * 3
            assert all(body["stream"] is True for body in up.bodies)
            await worker.close()

    run(scenario())


def test_a_server_without_priority_scheduling_is_not_sent_the_lane() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            up.accepts_priorities = False
            items = await call(up, wants_priorities=True)
            assert isinstance(items[-1], Done)
            assert "priority" not in up.bodies[0]

    run(scenario())


def test_cancelling_closes_the_upstream_connection() -> None:
    async def forever(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk("a"))
        await up.release.wait()
        return response

    async def scenario() -> None:
        async with Upstream(forever) as up:
            worker = OpenAIHttpWorker("up", HttpWorkerSettings(url=up.url), LoopClock())
            await worker.start()
            first = asyncio.Event()
            plan = BatchPlan(
                plan_id=1, worker="up", jobs=(a_job("j", body=BODY),), reason=ReleaseReason.IMMEDIATE, formed_at=0.0
            )
            running = asyncio.create_task(worker.run(plan, lambda item: first.set()))
            await first.wait()
            assert await worker.cancel(["j"]) == {"j"}
            await running
            await up.gone.wait()
            assert up.disconnects == 1
            await worker.close()

    run(scenario())


def test_impossible_counts_are_ignored() -> None:
    end = against(says(chunk("a"), chunk("b", "stop"), usage(10**25, 2), DONE))[-1]
    assert isinstance(end, Done | Failed)
    assert end.usage.prompt_tokens <= 10**9


def test_a_scanner_sees_tool_calls_as_output() -> None:
    scanner = EventScanner()
    call = {"index": 0, "function": {"arguments": '{"city"'}}
    _, tokens = scanner.scan(
        event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})
        + event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]})
    )
    assert tokens == 2
    assert scanner.finish is FinishReason.TOOL_CALLS


def test_the_scripted_server_itself_is_well_behaved() -> None:
    items = against(upstream.well_behaved)
    assert isinstance(items[-1], Done)
