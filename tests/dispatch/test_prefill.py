"""Prefill and decode on separate servers, in virtual time: scripted servers that hand KV over as vLLM does."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.values import HealthPolicy
from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.routes import WorkerRole
from inferry.domain.streams import Delta, Done, End, Failed
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run_pending
from support.upstream import DONE, Upstream, begin, chunk, event, role
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock

PROMPT, CACHED, WORDS = 2000, 512, ("one", " two", " three")
PREFILL_S, STEP_S = 0.4, 0.1
HANDLE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.1", "remote_port": 5600}
BODY = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "a long story"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 40,
        "min_tokens": 2,
        "stop": [" "],
        "temperature": 0.5,
    }
).encode()


def usage_of(output: int, cached: int) -> dict[str, Any]:
    counts = {"prompt_tokens": PROMPT, "completion_tokens": output, "total_tokens": PROMPT + output}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


async def prefills(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Computes a prompt as vLLM's NixlConnector does: the response tells where its KV is."""
    await asyncio.sleep(PREFILL_S)
    choice = {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "length"}
    answer = {"object": "chat.completion", "choices": [choice], "usage": usage_of(1, CACHED)}
    return web.json_response(answer | {"kv_transfer_params": HANDLE})


async def stores(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Computes a prompt as a connector with a shared store does: there is nothing to tell."""
    answer = {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "length"}], "usage": None}
    return web.json_response(answer | {"kv_transfer_params": None})


async def decodes(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Writes the words, after a prefill of its own where no KV is handed over."""
    response = await begin(request)
    await response.write(role())
    if "kv_transfer_params" not in body:
        await asyncio.sleep(PREFILL_S)
    for number, word in enumerate(WORDS):
        await asyncio.sleep(STEP_S)
        await response.write(chunk(word, "stop" if number == len(WORDS) - 1 else None))
    await response.write(event({"id": "up-1", "object": "x", "choices": [], "usage": usage_of(len(WORDS), PROMPT - 1)}))
    await response.write(DONE)
    return response


def refuses(status: int, code: str, **headers: str) -> Callable[..., Awaitable[web.StreamResponse]]:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no", "code": code}}, status=status, headers=headers)

    return script


async def waits(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await up.release.wait()
    return await prefills(up, request, body)


def without_kv(script: Callable[..., Awaitable[web.StreamResponse]]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Decodes calls without KV, and does `script` with those whose KV it is to fetch."""

    async def either(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (script if "kv_transfer_params" in body else decodes)(up, request, body)

    return either


class Fleet:
    """A gateway before the servers `p` (prefill) and `d` (decode), and more workers where a test names them."""

    def __init__(
        self, *servers: tuple[str, Upstream, WorkerRole, dict[str, Any]], lanes: dict[Lane, LanePolicy] | None = None
    ) -> None:
        self.clock = LoopClock()
        capacity = Capacity(sequences=8)
        self.workers = {
            name: OpenAIHttpWorker(
                name,
                HttpWorkerSettings(
                    **{"url": up.url, "role": worker_role, "capacity": capacity, "min_prefill_tokens": 1000} | fields
                ),
                self.clock,
            )
            for name, up, worker_role, fields in servers
        }
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.metrics = Metrics(["m"], list(self.workers))
        self.pool = Pool(self.workers.values(), self.clock, health=HealthPolicy())
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES if lanes is None else lanes,
            pool=self.pool,
            recorder=self.recorder,
            metrics=self.metrics,
            clock=self.clock,
        )

    def job(self, **fields: Any) -> InferenceJob:
        fields = {"tokens": PROMPT, "stream": True, "body": BODY} | fields
        job = a_job(at=self.clock.now(), **fields)
        return replace(job, token_budget=40, payload=replace(job.payload, include_usage=True))

    async def call(self, job: InferenceJob | None = None) -> tuple[str, End]:
        deltas, end = await read(self.gateway.submit(job or self.job()))
        return text_of(deltas), end

    def rows(self) -> list[LedgerEntry]:
        self.recorder.flush(120)
        return self.ledger.entries

    def attempts(self) -> list[tuple[str | None, Outcome]]:
        return [(row.worker, row.outcome) for row in self.rows()]

    def prefilled(self) -> dict[str, float]:
        rows = self.metrics.render()[0].decode().splitlines()
        found = [row.split("{", 1)[1].rsplit(" ", 1) for row in rows if row.startswith("inferry_prefills_total{")]
        return {labels.removesuffix("}").replace('"', ""): float(value) for labels, value in found}


def text_of(deltas: list[Delta]) -> str:
    events = b"".join(delta.raw for delta in deltas).split(b"\n\n")
    parsed = [json.loads(one[6:]) for one in events if one.startswith(b"data: {")]
    text = "".join(choice["delta"].get("content") or "" for one in parsed for choice in one["choices"])
    return text + "".join(delta.text for delta in deltas)


@asynccontextmanager
async def a_fleet(
    prefill: Upstream, decode: Upstream, *more: tuple[str, Upstream, WorkerRole, dict[str, Any]], **fields: Any
) -> AsyncIterator[Fleet]:
    lanes = fields.pop("lanes", None)
    async with prefill, decode:
        fleet = Fleet(("p", prefill, "prefill", fields), ("d", decode, "decode", {}), *more, lanes=lanes)
        fleet.gateway.start()
        while any(view.phase is not Phase.READY for view in fleet.pool.views()):
            await asyncio.sleep(0.01)
        try:
            yield fleet
        finally:
            await fleet.gateway.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    run_virtual_net(asyncio.wait_for(work, 300))


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


@pytest.mark.parametrize("tokens, cached, is_apart", [(1000, 0, True), (999, 0, False), (2000, 1001, False)])
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
def test_a_prefill_that_fails_is_no_error_of_the_call(script: Callable[..., Awaitable[web.StreamResponse]]) -> None:
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
    script: Callable[..., Awaitable[web.StreamResponse]],
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
        async with other, a_fleet(prefill, decode, ("whole", other, "both", {})) as fleet:
            fleet.pool.drain("d")
            assert isinstance((await fleet.call())[1], Done)
            assert (len(prefill.bodies), len(decode.bodies), len(other.bodies)) == (0, 0, 1)

    run(act())


def test_kv_goes_to_workers_that_can_take_it_while_one_is_up() -> None:
    async def act() -> None:
        prefill, decode, other = Upstream(waits), Upstream(decodes), Upstream(decodes)
        async with other, a_fleet(prefill, decode, ("whole", other, "both", {})) as fleet:
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
        async with other, a_fleet(prefill, decode, ("e", other, "decode", {"capacity": Capacity(sequences=1)})) as fleet:
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
