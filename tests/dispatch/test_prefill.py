"""Prefill and decode on separate servers, in virtual time: scripted servers that hand KV over as vLLM does."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from dispatch.prefill_harness import (
    BODY,
    CACHED,
    HANDLE,
    PREFILL_S,
    PROMPT,
    STEP_S,
    WORDS,
    a_fleet,
    decodes,
    prefills,
    refuses,
    run,
    stores,
    usage_of,
    waits,
    without_kv,
)
from inferry.domain.jobs import ResumeMode
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ledger import Outcome
from inferry.domain.streams import Done, Failed
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from support.loop_helpers import run_pending
from support.upstream import DONE, Script, Upstream, begin, chunk, event, role


def test_a_long_prompt_is_computed_on_one_server_and_its_answer_on_the_other() -> None:
    async def act() -> None:
        prefill, decode = Upstream(prefills), Upstream(decodes)
        async with a_fleet(prefill, decode) as fleet:
            text, end = await fleet.call()
            assert text == "".join(WORDS)
            assert isinstance(end, Done)
            (asked,), (then,) = prefill.bodies, decode.bodies
            assert asked["kv_transfer_params"]["do_remote_decode"] is True
            assert (asked["max_completion_tokens"], asked["min_tokens"], asked["ignore_eos"]) == (1, 1, True)
            assert not asked.keys() & {"stream", "stream_options", "stop"}
            assert asked["messages"] == then["messages"]
            assert then["kv_transfer_params"] == HANDLE
            assert (then["max_completion_tokens"], then["stop"], then["stream"]) == (40, [" "], True)
            assert prefill.headers[0]["x-request-id"] != decode.headers[0]["x-request-id"]

    run(act())


def test_tokens_are_counted_once_and_gpu_seconds_on_both() -> None:
    async def act() -> None:
        async with a_fleet(Upstream(prefills), Upstream(decodes)) as fleet:
            _, end = await fleet.call()
            # What the client sees is what is billed: cached is what the prefill server had cached.
            assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.output_tokens) == (PROMPT, CACHED, 3)
            assert isinstance(end, Done)
            assert json.loads(end.raw[6:])["usage"] == usage_of(3, CACHED)
            first, second = fleet.rows()
            assert (first.worker, first.outcome, first.error_code) == ("p", Outcome.PREFILLED, None)
            assert (first.prompt_tokens, first.cached_tokens, first.output_tokens, first.cost_nanos) == (0, 0, 0, None)
            assert (second.worker, second.outcome) == ("d", Outcome.DONE)
            assert (second.prompt_tokens, second.cached_tokens, second.output_tokens) == (PROMPT, CACHED, 3)
            assert first.gpu_seconds == pytest.approx(PREFILL_S, rel=0.05)
            assert second.gpu_seconds == pytest.approx(len(WORDS) * STEP_S, rel=0.05)
            assert fleet.prefilled() == {"worker=p,result=handed_over": 1}

    run(act())


def test_a_connector_with_a_shared_store_needs_no_parameters() -> None:
    async def act() -> None:
        prefill, decode = Upstream(stores), Upstream(decodes)
        async with a_fleet(prefill, decode) as fleet:
            text, end = await fleet.call()
            assert (text, end.usage.prompt_tokens) == ("".join(WORDS), PROMPT)
            assert len(prefill.bodies) == 1
            assert "kv_transfer_params" not in decode.bodies[0]

    run(act())


@pytest.mark.parametrize(("tokens", "cached", "is_apart"), [(1000, 0, True), (999, 0, False), (2000, 1001, False)])
def test_a_prompt_with_few_uncached_tokens_skips_the_prefill_server(tokens: int, cached: int, is_apart: bool) -> None:
    async def act() -> None:
        prefill = Upstream(prefills)
        async with a_fleet(prefill, Upstream(decodes)) as fleet:
            await fleet.call(fleet.job(tokens=tokens, cached=cached))
            assert len(prefill.bodies) == is_apart
            assert fleet.rows()[-1].attempt == 1 + is_apart

    run(act())


@pytest.mark.parametrize("change", [{"choices": 2}, {"non_streaming": True}, {"media_bytes": 10}])
def test_calls_whose_kv_is_not_handed_over_are_computed_whole(change: dict[str, Any]) -> None:
    async def act() -> None:
        prefill = Upstream(prefills)
        async with a_fleet(prefill, Upstream(decodes)) as fleet:
            job = fleet.job()
            fleet.gateway.submit(replace(job, payload=replace(job.payload, **change)))
            await fleet.gateway.drain()
            assert prefill.bodies == []

    run(act())


@pytest.mark.parametrize(
    "script",
    [
        refuses(500, "broken"),
        refuses(400, "invalid"),
        refuses(503, "full", **{"Retry-After": "3600"}),
        refuses(429, "full"),
        refuses(200, "in the body"),
    ],
)
def test_a_prefill_that_fails_is_no_error_of_the_call(script: Script) -> None:
    async def act() -> None:
        decode = Upstream(decodes)
        async with a_fleet(Upstream(script), decode) as fleet:
            text, end = await fleet.call()
            assert text == "".join(WORDS)
            assert isinstance(end, Done)
            assert end.usage.cached_tokens == PROMPT - 1, "nothing was handed over: the server's own count"
            assert "kv_transfer_params" not in decode.bodies[0]
            assert fleet.attempts() == [("p", Outcome.FAILED), ("d", Outcome.DONE)]
            assert fleet.prefilled() == {"worker=p,result=failed": 1}

    run(act())


def test_a_refused_prefill_does_not_count_against_its_server() -> None:
    async def act() -> None:
        async with a_fleet(Upstream(refuses(400, "invalid")), Upstream(decodes)) as fleet:
            await asyncio.gather(*(fleet.call() for _ in range(20)))
            assert [health.breaker for health in fleet.pool.health()] == ["closed", "closed"]

    run(act())


@pytest.mark.parametrize("script", [refuses(400, "no_such_block"), refuses(500, "kv_load_failed")])
def test_a_server_that_cannot_fetch_the_kv_computes_the_prompt(
    script: Script,
) -> None:
    async def act() -> None:
        decode = Upstream(without_kv(script))
        async with a_fleet(Upstream(prefills), decode) as fleet:
            for _ in range(10):
                text, end = await fleet.call()
                assert text == "".join(WORDS)
                assert isinstance(end, Done)
            assert ["kv_transfer_params" in body for body in decode.bodies] == [True, False] * 10
            assert fleet.attempts()[:3] == [("p", Outcome.PREFILLED), ("d", Outcome.FAILED), ("d", Outcome.DONE)]
            assert [health.breaker for health in fleet.pool.health()] == ["closed", "closed"]

    run(act())


async def breaks(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await response.write(role() + event({"error": {"message": "the KV could not be loaded", "code": 500}}) + DONE)
    return response


def test_kv_that_is_lost_after_the_response_has_begun_is_computed_again() -> None:
    async def act() -> None:
        async with a_fleet(Upstream(prefills), Upstream(without_kv(breaks))) as fleet:
            text, end = await fleet.call()
            assert text == "".join(WORDS)
            assert isinstance(end, Done)

    run(act())


def test_calls_that_wait_for_a_prefill_worker_which_goes_down_are_computed_whole() -> None:
    async def act() -> None:
        prefill = Upstream(waits)
        async with a_fleet(prefill, Upstream(decodes), capacity=Capacity(sequences=1)) as fleet:
            calls = [asyncio.create_task(fleet.call()) for _ in range(3)]
            while not prefill.bodies:
                await asyncio.sleep(0.01)
            fleet.pool.drain("p")
            ends = [await call for call in calls[1:]]
            assert all(isinstance(end, Done) for _, end in ends)
            prefill.release.set()  # a drained worker ends what it has
            assert isinstance((await calls[0])[1], Done)
            whole = [(None, Outcome.FAILED), ("d", Outcome.DONE)]
            assert sorted(map(str, fleet.attempts())) == sorted(
                map(str, [*whole, *whole, ("p", Outcome.PREFILLED), ("d", Outcome.DONE)])
            )
            # While it is down, calls do not ask for it.
            assert isinstance((await fleet.call())[1], Done)
            assert len(prefill.bodies) == 1

    run(act())


def test_calls_that_wait_for_a_prefill_worker_which_is_removed_are_computed_whole() -> None:
    async def act() -> None:
        prefill = Upstream(waits)
        async with a_fleet(prefill, Upstream(decodes), capacity=Capacity(sequences=1)) as fleet:
            calls = [asyncio.create_task(fleet.call()) for _ in range(2)]
            while not prefill.bodies:
                await asyncio.sleep(0.01)
            await fleet.pool.remove("p", grace_s=0.0)
            assert [isinstance((await call)[1], Done) for call in calls] == [True, True]

    run(act())


def test_without_a_decode_worker_that_is_up_no_prompt_is_computed_apart() -> None:
    async def act() -> None:
        prefill, decode, other = Upstream(prefills), Upstream(decodes), Upstream(decodes)
        async with other, a_fleet(prefill, decode, ("a", other, "both", {})) as fleet:
            fleet.pool.drain("d")
            assert isinstance((await fleet.call())[1], Done)
            assert (len(prefill.bodies), len(decode.bodies), len(other.bodies)) == (0, 0, 1)

    run(act())


def test_kv_goes_to_workers_that_can_take_it_while_one_is_up() -> None:
    async def act() -> None:
        prefill, decode, other = Upstream(waits), Upstream(decodes), Upstream(decodes)
        async with other, a_fleet(prefill, decode, ("a", other, "both", {})) as fleet:
            prefill.release.set()
            for _ in range(4):
                await fleet.call()
            assert (len(decode.bodies), len(other.bodies)) == (4, 0)
            prefill.release.clear()
            call = asyncio.create_task(fleet.call())
            await run_pending()
            fleet.pool.drain("d")
            prefill.release.set()
            assert isinstance((await call)[1], Done)
            assert "kv_transfer_params" not in other.bodies[0]

    run(act())


def test_a_lane_uses_the_prefill_workers_of_its_groups() -> None:
    async def act() -> None:
        prefill = Upstream(prefills)
        lanes = dict(DEFAULT_LANES) | {Lane.P2: replace(DEFAULT_LANES[Lane.P2], groups=("default",))}
        async with a_fleet(prefill, Upstream(decodes), lanes=lanes, group="fast") as fleet:
            assert isinstance((await fleet.call(fleet.job(lane=Lane.P2)))[1], Done)
            assert prefill.bodies == []
            await fleet.call(fleet.job(lane=Lane.P1))
            assert len(prefill.bodies) == 1

    run(act())


def test_a_cancel_stops_the_prefill() -> None:
    async def act() -> None:
        prefill, decode = Upstream(waits), Upstream(decodes)
        async with a_fleet(prefill, decode) as fleet:
            call = asyncio.create_task(fleet.call(fleet.job(job_id="j")))
            while not prefill.running:
                await asyncio.sleep(0.01)
            fleet.gateway.cancel("j")
            _, end = await call
            assert isinstance(end, Failed)
            assert end.error.code == "client_closed"
            await prefill.gone.wait()
            assert decode.bodies == []
            assert fleet.attempts() == [("p", Outcome.CANCELLED)]

    run(act())


def test_a_cancel_after_the_prefill_stops_the_decode() -> None:
    async def act() -> None:
        prefill, decode = Upstream(prefills), Upstream(decodes)
        async with a_fleet(prefill, decode) as fleet:
            call = asyncio.create_task(fleet.call(fleet.job(job_id="j")))
            while not decode.running:
                await asyncio.sleep(0.01)
            fleet.gateway.cancel("j")
            _, end = await call
            assert isinstance(end, Failed)
            await decode.gone.wait()
            assert fleet.attempts() == [("p", Outcome.PREFILLED), ("d", Outcome.CANCELLED)]

    run(act())


async def dies(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Writes one token with its id, then the connection breaks."""
    response = await begin(request)
    first = json.loads(chunk(WORDS[0])[6:])
    first["prompt_token_ids"] = list(range(PROMPT))
    first["choices"][0]["token_ids"] = [7]
    await response.write(event(first))
    assert request.transport is not None
    request.transport.abort()
    return response


async def resumes(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    for number, word in enumerate(WORDS[1:]):
        one = json.loads(chunk(word, "stop" if number else None, chat=False)[6:])
        one["choices"][0]["token_ids"] = [8 + number]
        await response.write(event(one))
    await response.write(event({"choices": [], "usage": usage_of(2, 0) | {"prompt_tokens": PROMPT + 1}}))
    await response.write(DONE)
    return response


def test_a_stream_that_is_lost_after_a_prefill_resumes_as_others_do() -> None:
    async def act() -> None:
        prefill, decode, other = Upstream(prefills), Upstream(dies), Upstream(resumes)
        async with (
            other,
            a_fleet(prefill, decode, ("e", other, "decode", {"capacity": Capacity(sequences=1)})) as fleet,
        ):
            job = fleet.job(resume=ResumeMode.CONTINUE)
            body = BODY.replace(b'"stop": [" "], ', b"")
            job = replace(job, payload=replace(job.payload, body=body))
            fleet.pool.drain("e")
            call = asyncio.create_task(fleet.call(job))
            while not decode.bodies:
                await asyncio.sleep(0.01)
            fleet.pool.readmit("e")
            text, end = await call
            assert text == "".join(WORDS)
            assert (end.usage.prompt_tokens, end.usage.output_tokens) == (PROMPT, 3)
            assert other.bodies[0]["prompt"] == [*range(PROMPT), 7]
            assert "kv_transfer_params" not in other.bodies[0]
            assert len(prefill.bodies) == 1
            assert fleet.attempts() == [("p", Outcome.PREFILLED), ("d", Outcome.FAILED), ("e", Outcome.DONE)]

    run(act())


def test_a_prefill_worker_alone_makes_no_gateway_ready() -> None:
    async def act() -> None:
        async with a_fleet(Upstream(prefills), Upstream(decodes)) as fleet:
            assert fleet.pool.is_ready
            assert fleet.pool.worker_count("m") == 1
            fleet.pool.drain("d")
            assert not fleet.pool.is_ready
            assert not fleet.pool.serves("m")

    run(act())
