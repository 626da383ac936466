"""Errors name the fields of the API that was called, not those of the chat request that it becomes."""

from typing import Any

import pytest

from inferry.domain.errors import InvalidRequest, QueueFull
from inferry.ingress.errors import FieldNames
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving, post

SCHEMA = {"type": "json_schema", "name": "a", "schema": {"properties": {"x": {"type": "objekt"}}}}
PATTERN = {"type": "json_schema", "name": "a", "schema": {"type": "string", "pattern": "(a"}}
TOO_LONG = "word " * 20_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**40}, "max_output_tokens"),
        ({"text": {"format": SCHEMA}}, "text.format.schema.properties.x.type"),
        ({"text": {"format": PATTERN}}, "text.format"),
        ({"temperature": 3.0}, "temperature"),
    ],
)
def test_responses_name_their_own_fields(real: Serving, fields: dict[str, Any], param: str) -> None:
    status, _, answer = post(real.url, "/v1/responses", {"model": "tiny", "input": "hello", **fields})
    assert status == 400
    assert answer["error"]["param"] == param
    assert f"`{param}`" in answer["error"]["message"]


def test_a_prompt_that_is_too_long_is_the_input(real: Serving) -> None:
    for more, param in (({}, "input"), ({"max_output_tokens": 10_000_000, "input": "short"}, "max_output_tokens")):
        status, _, answer = post(real.url, "/v1/responses", {"model": "tiny", "input": TOO_LONG, **more})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["param"] == param
        assert "max_tokens" not in answer["error"]["message"]


def test_messages_name_their_own_fields(real: Serving) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA["schema"]}}
    status, _, answer = post(real.url, "/v1/messages", {**body, "output_config": wanted})
    assert status == 400
    assert "`output_config.format.schema.properties.x.type`" in answer["error"]["message"]
    status, _, answer = post(real.url, "/v1/messages", {**body, "top_k": 2**40, "stop_sequences": [""]})
    assert "`stop_sequences`" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("change", "place"),
    [({"properties": {"a": {"type": "objekt"}}}, "{}.properties.a.type"), ({"type": "array"}, "{}.type")],
)
def test_schemas_of_tools_have_the_names_of_the_api(real: Serving, change: dict[str, Any], place: str) -> None:
    schema = {"type": "object", **change}
    fields = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    _, _, answer = post(real.url, "/v1/messages", {**fields, "tools": [{"name": "f", "input_schema": schema}]})
    assert f"`{place.format('tools[0].input_schema')}`" in answer["error"]["message"]
    tool = {"type": "function", "name": "f", "parameters": schema}
    _, _, answer = post(real.url, "/v1/responses", {"model": "tiny", "input": "hello", "tools": [tool]})
    assert answer["error"]["param"] == place.format("tools[0].parameters")
    assert f"`{answer['error']['param']}`" in answer["error"]["message"]
    _, _, answer = post(real.url, "/v1/chat/completions", {**fields, "tools": [{"type": "function", "function": tool}]})
    assert answer["error"]["param"] == place.format("tools[0].function.parameters")


def test_names_of_tools_have_the_names_of_the_api(real: Serving) -> None:
    fields = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    _, _, answer = post(real.url, "/v1/messages", {**fields, "tools": [{"name": "a b", "input_schema": {}}]})
    assert "`tools[0].name`" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("block", "missing"),
    [({"text": "hello"}, "type"), ({"type": "document", "source": {}}, "source.type")],
)
def test_a_missing_field_of_a_block_is_named(real: Serving, block: Any, missing: str) -> None:
    messages = [{"role": "user", "content": [block]}]
    _, _, answer = post(real.url, "/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": messages})
    assert answer["error"]["message"] == f"`messages[0].content[0].{missing}` is required"


def test_prefilled_answers_are_continued_or_refused_by_name(scripted: ScriptedGateway, real: Serving) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The answer"}]
    body = {"max_tokens": 9, "temperature": 0, "messages": turns}
    status, _, answer = post(scripted.url, "/v1/messages", {"model": "m", **body})
    assert status == 400
    assert "`messages: prefilled answer` is not supported by the model" in answer["error"]["message"]
    status, _, answer = post(real.url, "/v1/messages", {"model": "tiny", **body})
    assert status == 200
    chat = {"model": "tiny", **body, "continue_final_message": True}
    _, _, same = post(real.url, "/v1/chat/completions", chat)
    prompt = "<|bos|><|user|>hello<|end|><|assistant|>The answer"
    _, _, raw = post(
        real.url, "/v1/completions", {"model": "tiny", "max_tokens": 9, "temperature": 0, "prompt": prompt}
    )
    assert answer["content"][0]["text"] == same["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
    assert answer["usage"]["input_tokens"] == raw["usage"]["prompt_tokens"]


def test_other_errors_stay_as_they_are() -> None:
    names = FieldNames({"messages": "input"})
    full = QueueFull("the queue is full", retry_after_s=3.0)
    assert names.apply(full) is full
    other = InvalidRequest("`messages_x` is unknown", param="messages_x")
    assert names.apply(other) is other
    found = names.apply(InvalidRequest("`messages[3].content` must be text", param="messages[3].content"))
    assert (found.message, found.param) == ("`input` must be text", "input")
    assert isinstance(found, InvalidRequest)
