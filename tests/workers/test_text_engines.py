"""What servers are sent that take prompts as text and ignore what they do not know, and how their refusals are read.

The servers here are scripted; the contract has the real ones.
"""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from inferry.domain.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature, WorkerLost
from inferry.domain.values import replace
from inferry.domain.workers import Phase
from inferry.ingress.openai.features import check_fields, features_of
from inferry.ingress.openai.request_schema import ChatCompletionRequest, CompletionRequest
from inferry.workers.openai_http.profiles import HOSTED, LLAMACPP, TGI, TRANSFORMERS, VLLM, Profile
from inferry.workers.openai_http.upstream_errors import upstream_error
from support import upstream
from support.http_jobs import a_call, a_worker, done, error_of, ran, run
from support.upstream import Upstream

KINDS = pytest.mark.parametrize("profile", [TRANSFORMERS, LLAMACPP], ids=lambda profile: profile.kind)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOO_LONG = "This model's maximum context length is 64 tokens, however you requested 80 tokens."


def check(profile: Profile, body: dict[str, Any]) -> None:
    """As the gateway does before it takes a call."""
    raw = msgspec.json.encode(body)
    wire: ChatCompletionRequest | CompletionRequest
    if "messages" in body:
        wire = msgspec.json.decode(raw, type=ChatCompletionRequest)
    else:
        wire = msgspec.json.decode(raw, type=CompletionRequest)
    for feature, param in features_of(wire):
        if feature not in profile.features:
            raise UnsupportedFeature("", param=param)
    assert profile.fields is not None
    check_fields(wire, raw, profile.fields, "m")


@KINDS
@pytest.mark.parametrize(
    "fields",
    [
        *({"top_n_sigma": 1}, {"ignore_eos": True}, {"stop_token_ids": [3]}, {"cache_salt": "mine"}, {"n": 2}),
        *({"repetition_penalty": 1.2}, {"response_format": {"type": "json_object"}}, {"guided_regex": "a+"}),
        *({"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tool_choice": "required"}),
        *({"generation_config": "{}"}, {"grammar": "root ::= x"}, {"skip_special_tokens": False}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_a_server_would_ignore_is_refused_by_name(profile: Profile, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        check(profile, {**CHAT, **fields})
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        *({"top_k": 3}, {"stop_token_ids": [3]}, {"ignore_eos": True}, {"repetition_penalty": 1.2}),
        *({"guided_json": {"type": "object"}}, {"bad_words": ["a"]}, {"chat_template_kwargs": {"a": 1}}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_the_chat_endpoint_of_tgi_lacks_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        check(TGI, {**CHAT, **fields})
    assert caught.value.param == next(iter(fields))


def test_what_the_chat_endpoint_of_tgi_has_and_hints_are_accepted() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a"], "frequency_penalty": 0.5, "max_tokens": 3}
    outputs = {"response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 2}
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}
    hints = {"reasoning_effort": "low", "verbosity": "low", "metadata": {}, "user": "u", "store": False}
    check(TGI, {**CHAT, **sampling, **outputs, **tools, **hints, "modalities": ["text"]})


@pytest.mark.parametrize("name", ["stop", "top_k", "presence_penalty", "logit_bias", "logprobs"])
def test_what_one_server_can_do_is_refused_for_the_other_alone(name: str) -> None:
    value = {"stop": ["a"], "logit_bias": {"5": -1}, "logprobs": True}.get(name, 1)
    check(LLAMACPP, {**CHAT, name: value})
    with pytest.raises(UnsupportedFeature):
        check(TRANSFORMERS, {**CHAT, name: value})


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "the end"}], ids=lambda fields: next(iter(fields)))
def test_echo_and_suffix_are_refused_where_a_server_would_refuse_or_ignore_them(fields: dict[str, Any]) -> None:
    def lacks(profile: Profile, stream: bool) -> list[str]:
        body = msgspec.json.encode({"model": "m", "prompt": "hello", "stream": stream, **fields})
        wire = msgspec.json.decode(body, type=CompletionRequest)
        return [param for feature, param in features_of(wire) if feature not in profile.features]

    param = next(iter(fields))
    assert lacks(HOSTED, stream=False) == lacks(HOSTED, stream=True) == []
    assert lacks(LLAMACPP, stream=False) == []
    assert lacks(LLAMACPP, stream=True) == [param]
    assert set(lacks(VLLM, stream=True)) == ({"suffix"} if param == "suffix" else set())


def test_llamacpp_gets_echo_and_suffix() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            asked: dict[str, Any] = {"prompt": "hello", "echo": True, "suffix": "the end"}
            done(await ran(up, a_call(api="completions", **asked), profile=LLAMACPP))
            assert {name: up.bodies[0][name] for name in asked} == asked

    check(LLAMACPP, {"model": "m", "prompt": "hello", "echo": True, "suffix": "the end"})
    run(scenario())


@KINDS
def test_token_ids_are_refused_as_a_prompt(profile: Profile) -> None:
    check(profile, {"model": "m", "prompt": "hello"})
    for prompt in ([5, 6], ["hello"]):
        with pytest.raises(UnsupportedFeature) as caught:
            check(profile, {"model": "m", "prompt": prompt})
        assert caught.value.param == "prompt"


@KINDS
def test_defaults_are_accepted_and_what_has_no_effect_is_not_sent(profile: Profile) -> None:
    defaults = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "user": "u", "tool_choice": "auto", "stop": None}
    check(profile, {**CHAT, **defaults, "store": False, "metadata": {"a": "b"}, "ignore_eos": None})

    async def scenario() -> None:
        async with Upstream() as up:
            done(await ran(up, a_call(user="u", metadata={"a": "b"}, n=1), profile=profile))
            assert set(up.bodies[0]) == {"model", "messages", "max_tokens", "stream"}

    run(scenario())


@KINDS
@pytest.mark.parametrize(
    ("given", "sent"), [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6, "max_tokens": None}, 6), ({}, 8)]
)
def test_every_call_has_its_limit_under_the_name_that_is_known(
    profile: Profile, given: dict[str, Any], sent: int
) -> None:
    job = a_call()
    body = {name: value for name, value in json.loads(job.payload.body).items() if name != "max_tokens"}
    job = replace(job, payload=replace(job.payload, body=json.dumps(body | given).encode()))

    async def scenario() -> None:
        async with Upstream() as up:
            done(await ran(up, job, profile=profile))
            assert up.bodies[0]["max_tokens"] == sent
            assert "max_completion_tokens" not in up.bodies[0]

    run(scenario())


def test_llamacpp_gets_text_and_roles_that_it_knows_and_no_request_id() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts, "name": "n"}]

    async def scenario() -> None:
        async with Upstream() as up:
            done(await ran(up, a_call(messages=messages), profile=LLAMACPP))
            assert up.bodies[0]["messages"] == [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "aé", "name": "n"},
            ]
            assert "x-request-id" not in up.headers[0]

    run(scenario())


def refuses_silently(status: int, message: str) -> upstream.Script:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("stream"):
            return await upstream.begin(request)
        return web.json_response({"error": {"message": message}}, status=status)

    return script


def test_a_stream_that_ends_without_an_event_is_asked_for_the_reason() -> None:
    async def scenario() -> None:
        async with Upstream(refuses_silently(400, TOO_LONG)) as up:
            error = error_of(await ran(up, a_call(stream=True), profile=LLAMACPP))
            assert isinstance(error, ContextLengthExceeded)
            assert error.message == TOO_LONG
            assert [(body.get("stream"), body["max_tokens"]) for body in up.bodies] == [(True, 8), (None, 1)]

    run(scenario())


@pytest.mark.parametrize("profile", [LLAMACPP, TRANSFORMERS], ids=lambda profile: profile.kind)
def test_a_server_that_gives_no_reason_is_lost(profile: Profile) -> None:
    async def scenario() -> None:
        async with Upstream(refuses_silently(500, "llama_decode returned -1")) as up:
            assert isinstance(error_of(await ran(up, profile=profile)), WorkerLost)
            assert len(up.bodies) == (2 if profile.refuses_silently else 1)

    run(scenario())


def test_errors_of_other_web_frameworks_are_understood() -> None:
    plain = upstream_error("w", 422, b'{"detail":"Unexpected fields in the request: {\'top_k\'}"}')
    assert isinstance(plain, InvalidRequest)
    assert plain.message == "Unexpected fields in the request: {'top_k'}"
    listed = upstream_error("w", 422, b'{"detail":[{"loc":["body","prompt"],"msg":"not text"}]}')
    assert "not text" in listed.message
    invalid = upstream_error("w", 500, b'{"error":{"message":"2 validation errors:\\n  /srv/secret/path"}}')
    assert isinstance(invalid, InvalidRequest)
    assert "secret" not in invalid.message
    assert isinstance(upstream_error("w", 500, b'{"error":{"message":"out of memory"}}'), WorkerLost)


def test_a_server_that_lists_other_models_serves_those_of_the_configuration() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            worker = a_worker(up, profile=TRANSFORMERS, models=("org/tiny",), context_tokens=512)
            await worker.start()
            assert [(card.name, card.context_tokens) for card in worker.cards()] == [("org/tiny", 512)]
            await worker.close()
        gone = a_worker(up, profile=TRANSFORMERS, models=("org/tiny",))
        with pytest.raises(WorkerLost):
            await gone.start()
        await gone.close()

    run(scenario())


def test_a_listed_context_wins_over_a_configured_one() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            worker = a_worker(up, context_tokens=512)
            await worker.start()
            assert [card.context_tokens for card in worker.cards()] == [up.context_tokens]
            await worker.close()

    run(scenario())


@KINDS
def test_a_probe_does_not_wait_for_the_engine(profile: Profile) -> None:
    """The list of models would: one server computes it, the other interrupts its stream for it."""
    asked: list[str] = []

    class Counting(Upstream):
        async def _models(self, request: web.Request) -> web.Response:
            asked.append(request.path)
            return await super()._models(request)

    async def scenario() -> None:
        async with Counting() as up:
            worker = a_worker(up, profile=profile)
            await worker.start()
            await asyncio.sleep(30)
            assert worker.view().phase is Phase.READY
            assert len(asked) == 1
            await worker.close()

    run(scenario())


def test_a_server_that_may_ignore_salts_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            for owner, expected in (("vllm", 0), ("me", 1)):
                up.owner = owner
                done(await ran(up))
                assert sum("if it ignores `cache_salt`" in record.message for record in caplog.records) == expected
            done(await ran(up, cache_salts=False))
            assert sum("if it ignores `cache_salt`" in record.message for record in caplog.records) == 1

    run(scenario())


def test_a_shared_cache_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            for shares_cache in (False, True):
                done(await ran(up, profile=LLAMACPP, shares_cache=shares_cache))
                logged = [record.message for record in caplog.records if "tenants share" in record.message]
                assert len(logged) == shares_cache

    run(scenario())
