"""`inferry bench` as people meet it. Bytes go through sockets, in virtual time."""

import asyncio
import itertools
import time
from typing import Any

import pytest
from aiohttp import web

from inferry.cli.bench_output import warnings
from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.loadgen.load_generator import ClientLimits, LoadGenerator
from inferry.loadgen.requests import RequestForm, RequestMaker, RequestMetadata
from inferry.loadgen.result import to_json
from inferry.loadgen.traffic import Agents, Bursts
from inferry.sim.calls import Run, Step
from inferry.workers.http_client import Client
from loadgen.load_test_server import CROWD, Script, answer, bench, benched, calls_of, is_trial
from support.upstream import DONE, Upstream, chunk, event, usage
from support.virtual_net import run_virtual_net

# -- what is sent ------------------------------------------------------------------------------------------------------


def test_every_call_is_sent_answered_and_counted() -> None:
    result, upstream = benched()
    assert (result.done, result.failed, len(upstream.bodies)) == (12, 0, 12 + 1)
    lane = result.lanes["P1"]
    assert (lane.planned, lane.attainment, lane.output_tokens) == (12, 1.0, 48)
    assert {body["max_tokens"] for body, _ in calls_of(upstream)} == {4}
    assert sum(result.tokens_by_second["P1"]) == 48


def test_lanes_tenants_and_runs_are_sent_in_headers() -> None:
    traffic = replace(CROWD, tenants=("acme",), lanes={Lane.P0: 1.0})
    result, upstream = benched(traffic=traffic, key="k", request_metadata=RequestMetadata(headers={"x-more": "yes"}))
    body, headers = calls_of(upstream)[0]
    assert "priority" not in body
    assert headers["x-inferry-lane"] == "P0"
    assert headers["x-inferry-tenant"] == "acme"
    assert headers["x-inferry-run-id"].endswith("-burst-0")
    assert headers["x-inferry-step-id"] == "0-call"
    assert (headers["x-more"], headers["authorization"]) == ("yes", "Bearer k")
    kept = to_json(result)
    assert b"Bearer" not in kept
    assert b'"yes"' not in kept


def test_lanes_can_be_sent_as_priorities_or_not_at_all() -> None:
    traffic = replace(CROWD, lanes={Lane.P0: 1.0})
    quiet = RequestMetadata(lane_by="none", tenant_header=None, run_ids=False)
    _, told = benched(traffic=traffic, request_metadata=RequestMetadata(lane_by="priority"))
    _, silent = benched(traffic=traffic, request_metadata=quiet)
    assert {body["priority"] for body, _ in calls_of(told)} == {-10}
    assert not any("x-inferry-lane" in headers for _, headers in calls_of(told))
    for body, headers in calls_of(silent):
        assert "priority" not in body
        assert not [name for name in headers if name.startswith("x-inferry")]


def test_chat_prompts_are_sent_as_messages() -> None:
    result, upstream = benched(prompts="chat")
    assert result.done == 12
    assert all(body["messages"][0]["content"] for body, _ in calls_of(upstream))


def test_a_server_that_takes_no_ids_gets_words_of_the_right_length() -> None:
    async def wordy(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            return web.json_response({"error": {"message": "no"}}, status=400)
        return await answer(request, {**body, "prompt": [0] * (2 * len(body["prompt"].split()))})

    result, upstream = benched(wordy, replace(CROWD, prompt_tokens=(40, 40)))
    assert result.settings["form"] == {"prompts": "text", "usage": True, "end": "min_tokens", "words_per_token": 0.5}
    sent = [body for body, _ in calls_of(upstream)]
    assert {len(body["prompt"].split()) for body in sent} == {20}


def test_prompts_are_cut_to_the_context_the_server_names() -> None:
    result, upstream = benched(traffic=replace(CROWD, prompt_tokens=(5000, 5000)))
    assert result.shortened == 12
    assert max(len(body["prompt"]) for body, _ in calls_of(upstream)) == 4096 - 4
    assert any("were cut" in warning for warning in warnings(result))


# -- when it is sent ---------------------------------------------------------------------------------------------------


def watching(pause_s: float) -> tuple[Script, list[float], list[int]]:
    """A slow server, with when calls came and how many it had at once."""
    came: list[float] = []
    at_once = [0]
    now = 0

    async def script(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal now
        if is_trial(request):
            return await answer(request, body)
        came.append(time.perf_counter())
        now += 1
        at_once.append(now)
        try:
            return await answer(request, body, pause_s)
        finally:
            now -= 1

    return script, came, at_once


def test_a_call_is_sent_at_its_time_whatever_the_others_do() -> None:
    script, came, at_once = watching(0.25)
    result = bench(script)
    assert max(at_once) == 12
    due = [row.due_s for row in result.calls]
    # When it began is not told, so arrivals are compared among each other.
    assert [there - came[0] for there in came] == pytest.approx([wanted - due[0] for wanted in due], abs=1e-5)


@pytest.mark.parametrize("limits", [ClientLimits(pods=3), ClientLimits(concurrency_cap=3)])
def test_pods_send_one_call_at_a_time_and_their_waiting_counts(limits: ClientLimits) -> None:
    script, _, at_once = watching(0.02)
    result = bench(script, limits=limits)
    assert max(at_once) == 3
    assert result.done == 12
    waited = [row.sent_s for row in result.calls if row.sent_s is not None]
    assert max(waited) > 0.1
    assert all(row.ttft_s is not None and row.sent_s is not None and row.ttft_s >= row.sent_s for row in result.calls)


def test_steps_follow_one_another_when_their_tools_are_through() -> None:
    result = bench(traffic=replace(CROWD, bursts=None, agents=Agents(3, 3, (0.1, 0.1)), seconds=0.2))
    steps = [row for row in result.calls if row.run == "agent-1"]
    assert [row.step for row in steps] == ["step-0", "step-1", "step-2"]
    for before, after in itertools.pairwise(steps):
        assert after.due_s == pytest.approx(before.ended_s + 0.1, abs=1e-5)
    assert [run.ok for run in result.runs] == [True] * 3


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def failing_first(times: int, how: Script) -> Script:
    seen: dict[str, int] = {}

    async def script(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        run = request.headers["x-inferry-run-id"]
        seen[run] = seen.get(run, 0) + 1
        if is_trial(request) or seen[run] > times:
            return await answer(request, body)
        return await how(upstream, request, body)

    return script


async def hangs_up(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def says_later(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    error = {"error": {"message": "try again", "type": "overloaded", "code": "queue_full"}}
    return web.json_response(error, status=429, headers={"retry-after": "0.05"})


def test_resets_before_the_first_byte_are_tried_again_and_counted() -> None:
    traffic = replace(CROWD, bursts=Bursts(3, 0.2, 0.1))
    result = bench(failing_first(1, hangs_up), traffic)
    assert (result.done, result.lanes["P1"].resets) == (3, 3)
    assert all(0.375 <= row.end_s <= 0.5 for row in result.calls)  # they waited before they tried again
    given_up = bench(failing_first(1, hangs_up), traffic, limits=ClientLimits(retries=0))
    assert given_up.lanes["P1"].failures == {"reset": 3}
    assert given_up.lanes["P1"].attainment == 0.0


def test_refusals_are_retried_after_retry_after() -> None:
    result = bench(failing_first(2, says_later))
    assert (result.done, result.lanes["P1"].refused) == (12, 24)
    assert [row.end_s for row in result.calls] == pytest.approx([0.1] * 12)
    refused = bench(failing_first(9, says_later))
    assert refused.lanes["P1"].failures == {"http 429 queue_full": 12}
    assert refused.failures == {"http 429 queue_full": "try again"}


def ending(last: bytes) -> Script:
    async def script(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await answer(request, body, last=b"" if is_trial(request) else last)

    return script


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (event({"error": {"message": "m", "code": "worker_lost"}}) + DONE, "in band: worker_lost"),
        (DONE, "broke off"),
        (chunk("x", "stop", chat=False) + usage(9, 3) + DONE, "stop too early"),
    ],
)
def test_an_invalid_answer_is_counted_by_its_kind_of_failure(last: bytes, kind: str) -> None:
    result = bench(ending(last))
    assert (result.done, result.lanes["P1"].failures) == (0, {kind: 12})


def test_an_unresponsive_server_times_out() -> None:
    async def silent(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if is_trial(request):
            return await answer(request, body)
        await asyncio.sleep(60)
        return web.Response()

    result, upstream = benched(silent, limits=ClientLimits(call_timeout_s=0.3))
    assert result.lanes["P1"].failures == {"timeout": 12}
    assert upstream.disconnects == 12


def test_an_abandoned_run_closes_its_connection() -> None:
    step = Step("s", ((1, 0, 20),), 50)
    leaving = Run(run_id="leaving", tenant="a", lane=Lane.P0, at=0.0, steps=(step, step), cancel_after_s=0.3)
    staying = Run(run_id="staying", tenant="a", lane=Lane.P0, at=0.0, steps=(step,))

    async def main() -> None:
        script, _, _ = watching(0.02)
        async with Upstream(script) as upstream:
            client = Client(upstream.url, {}, 5.0)
            load_generator = LoadGenerator(
                client, RequestMaker(client, "m", RequestForm(), RequestMetadata(), "salt"), ClientLimits()
            )
            await load_generator.play([leaving, staying])
            await asyncio.wait_for(upstream.gone.wait(), 10)
            client.close()
            assert upstream.disconnects == 1
        assert {call.run.run_id: call.outcome for call in load_generator.calls} == {
            "leaving": "cancelled",
            "staying": "done",
        }
        left, stayed = sorted(load_generator.run_records, key=lambda one: one.run.run_id)
        assert (left.cancelled, left.ok, stayed.cancelled, stayed.ok) == (True, False, False, True)
        assert left.ended - left.began == pytest.approx(0.3)
        assert left.ended < stayed.ended

    run_virtual_net(main())
