"""The scripted model answers as a model would, and always the same."""

import json
from typing import Any

import pytest

from support.model_rules import Call, Reply, asked, reply
from support.scripted_model import ScriptedModelServer
from support.serving import post

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADDER = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def a_body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


@pytest.mark.parametrize(
    ("text", "more", "calls"),
    [
        ("Hello", {}, []),
        ("What is the weather in Bern?", {}, [("get_weather", {"city": "Bern"})]),
        ("Please add 3 and 4", {}, [("add", {"a": 3, "b": 4})]),
        ("Call get_weather twice, for Bern and Basel", {}, [("get_weather", {"city": c}) for c in ("Bern", "Basel")]),
        ("Use both in parallel: 'Chur', 1, 2", {}, [("get_weather", {"city": "Chur"}), ("add", {"a": 1, "b": 2})]),
        ("Call get_weather twice, for Bern", {"parallel_tool_calls": False}, [("get_weather", {"city": "Bern"})]),
        ("Hello", {"tool_choice": "required"}, [("get_weather", {"city": "Hello"})]),
        ("5 6", {"tool_choice": {"type": "function", "function": {"name": "add"}}}, [("add", {"a": 5, "b": 6})]),
        ("What is the weather in Bern?", {"tool_choice": "none"}, []),
    ],
)  # fmt: skip
def test_it_calls_the_tools_that_the_user_asks_for(text: str, more: dict[str, Any], calls: list[Any]) -> None:
    said = reply(a_body(text, tools=[WEATHER, ADDER], **more))
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == calls
    assert bool(said.text) != bool(calls)


def test_it_repeats_tool_results_in_order() -> None:
    body = a_body("Weather?", tools=[WEATHER])
    body["messages"] += [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "sun"}]
    assert reply(body).text == "The tool says: rain / sun"


def test_it_fills_schemas() -> None:
    schema = {
        "$defs": {"P": {"type": "object", "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}}}},
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "who": {"$ref": "#/$defs/P"},
            "mood": {"enum": ["sad", "happy"]},
            "tags": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "number"}]}},
        },
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    said = reply(a_body("A happy person called 'Ada', 36 years, 1.5 tall", response_format=wanted))
    expected = {"name": "Ada", "who": {"age": 36, "ok": True}, "mood": "happy", "tags": [1.5]}
    assert json.loads(said.text) == expected


def test_it_reasons_when_asked() -> None:
    assert reply(a_body("Hello")).reasoning == ""
    for body in (a_body("Think first."), a_body("Hi", reasoning_effort="low")):
        assert reply(body).reasoning


def test_rules_of_a_test_come_first() -> None:
    said = reply(a_body("x"), [lambda question: Reply(calls=(Call("bash", "{}"),))])
    assert said.calls == (Call("bash", "{}"),)
    assert asked(a_body("x")).text == "x"


def test_streamed_and_whole_answers_of_the_server_agree() -> None:
    body = a_body("Think, then tell me the weather in Bern.", tools=[WEATHER])
    with ScriptedModelServer() as server:
        _, _, first = post(server.url, "/v1/chat/completions", body)
        _, _, whole = post(server.url, "/v1/chat/completions", body)
        streaming = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        _, _, events = post(server.url, "/v1/chat/completions", {**body, **streaming})
    chunks = [json.loads(line[6:]) for line in events.split("\n\n") if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    message = whole["choices"][0]["message"]
    assert "".join(one["delta"].get("reasoning", "") for one in choices) == message["reasoning"]
    pieces = [one["delta"]["tool_calls"][0]["function"] for one in choices if "tool_calls" in one["delta"]]
    assert "".join(one.get("arguments", "") for one in pieces) == message["tool_calls"][0]["function"]["arguments"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == whole["usage"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": whole["usage"]["prompt_tokens"]}
    assert len(chunks[0]["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert sum(len(one["token_ids"] or ()) for one in choices) == whole["usage"]["completion_tokens"]
    assert events.endswith("data: [DONE]\n\n")
