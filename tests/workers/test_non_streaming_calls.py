"""Non-streaming calls: the server's body is forwarded unchanged."""

from typing import Any

import pytest
from aiohttp import web

from inferry.domain.errors import InvalidRequest, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, FinishReason, Usage
from inferry.domain.values import replace
from inferry.workers.openai_http.profiles import HOSTED
from support.http_jobs import a_call, done, error_of, ran, run
from support.upstream import Script, Upstream

ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"h\xc3\xa9"},'
    b'"finish_reason":"length","x":null}],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":'
    b'{"cached_tokens":3}},"prompt_logprobs":[null]}'
)


def a_whole_call(**more: Any) -> InferenceJob:
    job = a_call(prompt_logprobs=1, **more)
    return replace(job, payload=replace(job.payload, non_streaming=True))


def answering(body: bytes, status: int = 200, cut: bool = False) -> Script:
    async def script(up: Upstream, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        if not cut:
            return web.Response(status=status, body=body, content_type="application/json")
        response = web.StreamResponse(headers={"content-length": str(len(body) + 10)})
        await response.prepare(request)
        await response.write(body)
        assert request.transport is not None
        request.transport.close()
        return response

    return script


def test_the_answer_is_passed_on_as_it_came_and_its_usage_is_the_jobs() -> None:
    async def scenario() -> None:
        async with Upstream(answering(ANSWER)) as up:
            delta, end = await ran(up, a_whole_call())
            assert isinstance(delta, Delta)
            assert (delta.raw, delta.tokens) == (ANSWER, 1)
            assert done([end]).usage == Usage(9, 3, 4)
            assert done([end]).finish is FinishReason.LENGTH
            sent = up.bodies[0]
            assert not {"stream", "stream_options", "return_token_ids"} & sent.keys()
            assert sent["prompt_logprobs"] == 1

    run(scenario())


def test_non_streaming_calls_respect_the_profile_and_the_output_cap() -> None:
    async def scenario() -> None:
        async with Upstream(answering(ANSWER)) as up:
            job = a_whole_call(priority=3, stream=False)
            await ran(up, replace(job, payload=replace(job.payload, output_cap=2)), profile=HOSTED)
            sent = up.bodies[0]
            assert sent["max_tokens"] == 2
            assert "priority" not in sent

    run(scenario())


@pytest.mark.parametrize(
    "script",
    [
        answering(ANSWER[:-5]),
        answering(b"hello"),
        answering(ANSWER.replace(b"\xc3\xa9", b"\xff")),
        answering(ANSWER.replace(b'"index":0', b'"x":"\xff"')),
        answering(b'{"error":{"message":"boom"}}'),
        answering(ANSWER.replace(b'"length"', b'"abort"')),
        answering(ANSWER.replace(b'"length"', b"null")),
        answering(ANSWER, cut=True),
        answering(b"", status=500),
    ],
)
def test_an_invalid_answer_is_worker_lost(script: Script) -> None:
    async def scenario() -> None:
        async with Upstream(script) as up:
            items = await ran(up, a_whole_call())
            assert isinstance(error_of(items), WorkerLost)
            assert len(items) == 1, "nobody has seen anything of it"

    run(scenario())


def test_a_refusal_is_mapped_by_its_status() -> None:
    async def scenario() -> None:
        async with Upstream(answering(b'{"error":{"message":"no such thing"}}', status=400)) as up:
            error = error_of(await ran(up, a_whole_call()))
            assert isinstance(error, InvalidRequest)
            assert error.message == "no such thing"

    run(scenario())


def test_malformed_usage_is_removed_and_does_not_fail_the_call() -> None:
    async def scenario() -> None:
        for counts in (b'"prompt_tokens":"9"', b'"prompt_tokens":NaN', b'"prompt_tokens":9.5'):
            async with Upstream(answering(ANSWER.replace(b'"prompt_tokens":9', counts))) as up:
                items = await ran(up, a_whole_call())
                assert done(items).usage == Usage(output_tokens=1)
                (delta,) = [one for one in items if isinstance(one, Delta)]
                assert b'"usage"' not in delta.raw
                assert delta.raw.startswith(ANSWER[:40])

    run(scenario())
