"""Features of chat calls with the official client: forwarded if the worker supports them, else refused by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from openai import OpenAI
from pydantic import BaseModel

from support.http_gateway import HttpGateway
from support.serving import Serving
from support.upstream import DONE, Upstream, begin, event, usage

HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}

PASSED_ON: list[dict[str, Any]] = [
    {"tools": [WEATHER, CLOCK]},
    {"tools": [WEATHER], "tool_choice": "auto"},
    {"tools": [WEATHER], "tool_choice": "none"},
    {"tools": [WEATHER], "tool_choice": "required"},
    {"tools": [WEATHER], "tool_choice": NAMED},
    {"tools": [WEATHER], "parallel_tool_calls": False},
    {"response_format": {"type": "json_object"}},
    {"response_format": JSON_SCHEMA},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 2},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"seed": 7},
    {"stop": ["\n\n", "END"]},
    {"logit_bias": {"50256": -100}},
    {"max_completion_tokens": 17},
    {"max_tokens": 17},
    {"temperature": 0.25, "top_p": 0.5},
    {"reasoning_effort": "low"},
    {"user": "u-1"},
]


def chat_chunk(choices: list[dict[str, Any]]) -> bytes:
    head = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**head, "choices": choices})


def choice(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def call_piece(index: int, **piece: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **piece}]}


TOOL_DELTAS = [
    {"role": "assistant", "content": None},
    call_piece(0, id="call-1", type="function", function={"name": "weather", "arguments": ""}),
    call_piece(0, function={"arguments": '{"city": "O'}),
    call_piece(0, function={"arguments": 'slo \\"é\\""}'}),
    call_piece(1, id="call-2", type="function", function={"name": "clock", "arguments": ""}),
    call_piece(1, function={"arguments": "{}"}),
]


def logprob(token: str) -> dict[str, Any]:
    top = [{"token": token, "logprob": -0.5, "bytes": None}, {"token": "x", "logprob": -1.5, "bytes": None}]
    return {"content": [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": top}]}


async def answers(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As an engine with everything would: tools where they are forced, JSON where it is asked for, else words."""
    response = await begin(request)
    if body.get("tool_choice") in ("required", NAMED):
        for delta in TOOL_DELTAS:
            await response.write(chat_chunk([choice(0, delta)]))
        await response.write(chat_chunk([choice(0, {}, "tool_calls")]))
        count = 9
    else:
        words = ['{"city"', ':"Oslo"', "}"] if body.get("response_format") else ["fine", " and", " cold"]
        for index in range(body.get("n") or 1):
            await response.write(chat_chunk([choice(index, {"role": "assistant", "content": ""})]))
        for word in words:
            for index in range(body.get("n") or 1):
                text = word if index == 0 else word.upper()
                probs = logprob(text) if body.get("logprobs") else None
                await response.write(chat_chunk([choice(index, {"content": text}, None, probs)]))
        for index in range(body.get("n") or 1):
            await response.write(chat_chunk([choice(index, {}, "stop")]))
        count = 3 * (body.get("n") or 1)
    await response.write(usage(12, count))
    await response.write(DONE)
    await response.write_eof()
    return response


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    with HttpGateway(tmp_path_factory.mktemp("able"), answers) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def api(able: HttpGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=able.url + "/v1", api_key=able.key("acme"), max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("fields", PASSED_ON, ids=lambda fields: "-".join(fields))
def test_supported_features_reach_the_worker_unchanged(
    able: HttpGateway, api: OpenAI, fields: dict[str, Any], streams: bool
) -> None:
    answer: Any = api.chat.completions.create(model="m", messages=HELLO, stream=streams, **fields)
    if streams:
        assert [one.choices[0].finish_reason for one in answer if one.choices][-1]
    else:
        assert answer.choices[0].finish_reason
    sent = able.upstream.bodies[-1]
    assert {name: sent.get(name) for name in fields} == fields
    assert sent["messages"] == HELLO
    ours = {"stream", "stream_options", "cache_salt", "priority", "return_token_ids"}
    assert set(sent) - ours == {"model", "messages", *fields}, "and nothing is added but what is ours"


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_tool_calls_come_back_complete(api: OpenAI, tool_choice: Any) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": tool_choice}
    whole = api.chat.completions.create(**asked).choices[0]
    with api.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    for one in (whole, streamed):
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        assert one.message.tool_calls is not None
        calls = [(call.id, call.type, call.function.name, call.function.arguments) for call in one.message.tool_calls]
        assert calls == [
            ("call-1", "function", "weather", '{"city": "Oslo \\"é\\""}'),
            ("call-2", "function", "clock", "{}"),
        ]
        assert json.loads(calls[0][3]) == {"city": 'Oslo "é"'}


def test_an_agent_answers_a_tool_call_and_continues(able: HttpGateway, api: OpenAI) -> None:
    asked: Any = {"model": "m", "tools": [WEATHER, CLOCK]}
    first = api.chat.completions.create(**asked, messages=HELLO, tool_choice="required").choices[0].message
    assert first.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "cold"} for call in first.tool_calls]
    history: Any = [*HELLO, first.model_dump(exclude_none=True), *results]
    second = api.chat.completions.create(**asked, messages=history)
    assert second.choices[0].message.content == "fine and cold"
    assert able.upstream.bodies[-1]["messages"] == history


def test_every_choice_comes_back(api: OpenAI) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "n": 3}
    whole = api.chat.completions.create(**asked)
    said = [one.message.content for one in whole.choices]
    assert said == ["fine and cold", "FINE AND COLD", "FINE AND COLD"]
    assert [one.index for one in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9
    texts: dict[int, str] = {}
    for chunk in api.chat.completions.create(**asked, stream=True):
        for one in chunk.choices:
            texts[one.index] = texts.get(one.index, "") + (one.delta.content or "")
    assert [texts[index] for index in range(3)] == said


def test_log_probabilities_come_back_for_every_token(api: OpenAI) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    whole = api.chat.completions.create(**asked).choices[0]
    with api.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    for one in (whole, streamed):
        assert one.logprobs is not None
        assert one.logprobs.content is not None
        assert [token.token for token in one.logprobs.content] == ["fine", " and", " cold"]
        assert all(len(token.top_logprobs) == 2 for token in one.logprobs.content)


class Place(BaseModel):
    city: str


def test_structured_outputs_parse_into_the_requested_type(able: HttpGateway, api: OpenAI) -> None:
    answer = api.chat.completions.parse(model="m", messages=HELLO, response_format=Place)
    assert answer.choices[0].message.parsed == Place(city="Oslo")
    sent = able.upstream.bodies[-1]["response_format"]
    assert (sent["type"], sent["json_schema"]["name"]) == ("json_schema", "Place")
    with api.chat.completions.stream(model="m", messages=HELLO, response_format=Place) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Place(city="Oslo")


# -- where the worker cannot -----------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("functions", {"functions": [{"name": "f"}]}),
    ("prompt_logprobs", {"extra_body": {"prompt_logprobs": 1}}),
    ("n", {"n": 2}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    *(
        (name, {"extra_body": {name: value}})
        for name, value in {
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "allowed_token_ids": [5],
            "bad_words": ["bad"],
            "logits_processors": ["a.b"],
            "truncate_prompt_tokens": 3,
            "thinking_token_budget": 3,
            "chat_template": "{{ messages }}",
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"text": "a"}],
            "min_tokens": 2,
        }.items()
    ),
]


def here(gateway: Serving) -> OpenAI:
    return OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=lambda one: one if isinstance(one, str) else "")
def test_the_embedded_engine_refuses_unsupported_features_by_name(
    real: Serving, param: str, fields: dict[str, Any]
) -> None:
    with here(real) as api, pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 2, **fields})
    assert (refused.value.code, refused.value.param) == ("unsupported_feature", param)
    assert f"`{param}`" in refused.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logprobs": False, "logit_bias": {}},
        {"tools": [], "tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"seed": 3, "stop": "zzz", "temperature": 0.5, "top_p": 0.9},
        {"reasoning_effort": "low", "verbosity": "low", "metadata": {"a": "b"}, "user": "u", "store": False},
        {"extra_body": {"include_stop_str_in_output": False, "skip_special_tokens": True, "chat_template_kwargs": {}}},
        {"extra_body": {"stop_token_ids": [5], "ignore_eos": True, "top_k": 3}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_feature_fields_without_effect_are_served(real: Serving, fields: dict[str, Any]) -> None:
    with here(real) as api:
        asked: Any = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 2, **fields}
        answer = api.chat.completions.create(**asked)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 2


def test_a_profile_without_a_feature_refuses_it_over_http_too(tmp_path: Path) -> None:
    with (
        HttpGateway(tmp_path, answers, kind="tgi") as gateway,
        OpenAI(base_url=gateway.url + "/v1", api_key=gateway.key("acme"), max_retries=0) as api,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model="m", messages=HELLO, n=2)
        assert (refused.value.code, refused.value.param) == ("unsupported_feature", "n")
        assert api.chat.completions.create(model="m", messages=HELLO, seed=2).choices[0].message.content
