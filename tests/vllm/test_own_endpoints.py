"""Messages and Responses through the gateway are what vLLM's own endpoints answer, except for documented differences.

Sampling is greedy in float32, so texts are equal. Answers that call tools are forced by a grammar: the model has random
weights.
"""

import http.client
import json
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent

from support.gateway_process import GatewayProcess
from support.serving import post
from support.vllm_differences import MESSAGES, RESPONSES, without
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
HELLO = {"role": "user", "content": "hello there"}
LOOKUP = {"name": "lookup", "input_schema": CITY, "strict": True}
ONE = {"disable_parallel_tool_use": True}
CALLED = {"type": "tool_use", "id": "call-1", "name": "lookup", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "rain"}]}
MESSAGE_CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "end of turn": {"system": "You are.", "max_tokens": 40},
    "system blocks": {"system": [{"type": "text", "text": "You are."}]},
    "stop sequence": {"stop_sequences": ["e", "o"], "max_tokens": 60},
    "sampling": {"top_p": 0.9, "top_k": 1, "metadata": {"user_id": "u"}},
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]},
    "conversation": {"messages": [HELLO, {"role": "assistant", "content": "hm"}, HELLO]},
    "thinking": {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
    "tool result": {
        "messages": [
            HELLO,
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALLED]},
            {"role": "user", "content": [RESULT]},
        ],
        "tools": [LOOKUP],
    },
    "named tool": {"tools": [LOOKUP], "tool_choice": {"type": "tool", "name": "lookup", **ONE}, "max_tokens": 400},
    "any tool": {"tools": [LOOKUP], "tool_choice": {"type": "any", **ONE}, "max_tokens": 400},
    "no tool": {"tools": [LOOKUP], "tool_choice": {"type": "none"}},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": CITY}}, "max_tokens": 400},
}
FUNCTION = {"type": "function", "name": "lookup", "parameters": CITY, "strict": True}
RESPONSE_CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "end of turn": {"instructions": "You are.", "max_output_tokens": 40},
    "messages": {"input": [HELLO, {"role": "assistant", "content": "hm"}, HELLO]},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello there"}]}]},
    "function output": {
        "input": [
            HELLO,
            {"type": "function_call", "call_id": "call-1", "name": "lookup", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call_output", "call_id": "call-1", "output": "rain"},
        ],
        "tools": [FUNCTION],
    },
    "named tool": {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "lookup"},
        "parallel_tool_calls": False,
        "max_output_tokens": 400,
    },
    "any tool": {
        "tools": [FUNCTION],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 400,
    },
    "schema": {
        "text": {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}},
        "max_output_tokens": 400,
    },
}


def models_of(union: Any) -> dict[str, Any]:
    """The SDK's models of events, by their types."""
    models = typing.get_args(typing.get_args(union)[0])
    return {name: model for model in models for name in typing.get_args(model.model_fields["type"].annotation)}


MESSAGE_EVENTS = models_of(RawMessageStreamEvent)
RESPONSE_EVENTS = models_of(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    scratch = tmp_path_factory.mktemp("own")
    copy = scratch / "model"
    shutil.copytree(model, copy)
    tokenizer = copy / "tokenizer.json"
    # vLLM's Responses API adds the tokenizer's own BOS to that of the chat template. Without one, prompts are equal.
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "post_processor": None}))
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details")
    with VllmServer(copy, scratch / "vllm.log", *tools) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    worker = {"kind": "vllm", "name": "a", "url": server.url}
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), {"workers": [worker]}) as gateway:
        yield gateway


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    status, _, answer = post(url, path, body)
    assert status == 200, answer
    return answer


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        body = {**body, "stream": True}
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
    finally:
        connection.close()
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines and lines["data"] != "[DONE]":
            found.append(json.loads(lines["data"]))
            assert lines["event"] == found[-1]["type"]
    return found


def joined(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events with consecutive pieces of one text joined: where they are cut depends on when they were read."""
    found: list[dict[str, Any]] = []
    for event in stream:
        event = {key: value for key, value in event.items() if key != "sequence_number"}
        last = found[-1] if found else {}
        if not event["type"].endswith("delta") or event["type"] == "message_delta" or last.get("type") != event["type"]:
            found.append(event)
            continue
        if isinstance(event["delta"], str):
            last["delta"] += event["delta"]
        else:
            for key, value in event["delta"].items():
                if key != "type":
                    last["delta"][key] += value
    return found


# -- Messages ----------------------------------------------------------------------------------------------------------


def messages_body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 12, "temperature": 0, "messages": [HELLO], **fields}


def message(answer: dict[str, Any]) -> Any:
    """A message that Anthropic's SDK accepts, without what differs. The ids of tool calls are drawn."""
    Message.model_validate(answer)
    return without({"stop_sequence": None, **answer}, MESSAGES)


def message_events(stream: list[dict[str, Any]]) -> Any:
    for event in stream:
        MESSAGE_EVENTS[event["type"]].model_validate(event)
    found = without(joined(stream), MESSAGES)
    del found[0]["message"]["usage"]
    return found


@pytest.mark.parametrize("fields", MESSAGE_CASES.values(), ids=MESSAGE_CASES)
def test_a_whole_message_is_vllms_own(server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]) -> None:
    body = messages_body(fields)
    assert message(ask(gateway.url, "/v1/messages", body)) == message(ask(server.url, "/v1/messages", body))


@pytest.mark.parametrize("fields", MESSAGE_CASES.values(), ids=MESSAGE_CASES)
def test_the_events_of_a_message_are_vllms_own(
    server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    body = messages_body(fields)
    through, direct = (message_events(events(one.url, "/v1/messages", body)) for one in (gateway, server))
    assert through == direct


def test_a_prefilled_answer_is_continued_as_in_chat(server: VllmServer, gateway: GatewayProcess) -> None:
    """vLLM's own endpoint begins another message instead."""
    messages = [HELLO, {"role": "assistant", "content": "hear deco"}]
    chat = {"model": "m", "max_tokens": 12, "temperature": 0, "messages": messages}
    chat |= {"continue_final_message": True, "add_generation_prompt": False}
    direct = ask(server.url, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    body = messages_body({"messages": messages})
    whole = ask(gateway.url, "/v1/messages", body)
    pieces = [
        one["delta"]["text"]
        for one in joined(events(gateway.url, "/v1/messages", body))
        if "text" in one.get("delta", {})
    ]
    assert whole["content"] == [{"type": "text", "text": direct}]
    assert pieces == [direct]
    counted = ask(gateway.url, "/v1/messages/count_tokens", {"model": "m", "messages": messages})
    assert counted["input_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_thinking_is_accepted_for_models_that_do_not_reason(gateway: GatewayProcess, kind: str) -> None:
    thinking = {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
    body = messages_body({"thinking": thinking})
    assert (
        ask(gateway.url, "/v1/messages", body)["content"]
        == ask(gateway.url, "/v1/messages", messages_body({}))["content"]
    )


def test_tokens_are_counted_as_vllm_counts(server: VllmServer, gateway: GatewayProcess) -> None:
    for case in ("text", "end of turn", "tool result"):
        body = messages_body(MESSAGE_CASES[case])
        del body["max_tokens"], body["temperature"]
        counts = [ask(one.url, "/v1/messages/count_tokens", body)["input_tokens"] for one in (gateway, server)]
        assert counts[0] == counts[1], case


# -- Responses ---------------------------------------------------------------------------------------------------------


def responses_body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_output_tokens": 12, "temperature": 0, "input": "hello there", **fields}


def response(answer: dict[str, Any]) -> Any:
    """A response that OpenAI's SDK accepts, without what differs."""
    Response.model_validate(answer)
    text = answer.pop("text")
    found = without(answer, RESPONSES)
    if text is not None and text["format"]["type"] != "text":
        found["format"] = without(text["format"], RESPONSES)
    if not found["tools"]:
        del found["tool_choice"]
    del found["created_at"]
    found["output"] = [item(one) for one in found["output"]]
    return found


def item(found: dict[str, Any]) -> dict[str, Any]:
    """An item without the ids that are drawn, its arguments parsed."""
    found = {key: value for key, value in found.items() if key not in ("id", "call_id", "status")}
    if found.get("arguments"):
        found["arguments"] = json.loads(found["arguments"])
    return found


def response_events(stream: list[dict[str, Any]]) -> Any:
    numbers = [event["sequence_number"] for event in stream]
    assert numbers == list(range(len(stream)))
    found = []
    for event in joined(stream):
        RESPONSE_EVENTS[event["type"]].model_validate({**event, "sequence_number": 0})
        if "response" in event:
            whole = response(event["response"])
            is_last = whole["status"] != "in_progress"
            event = {"type": "the last" if is_last else event["type"], "response": whole}
        elif event["type"] == "response.function_call_arguments.done":
            event.pop("name", None)
        elif "item" in event:
            event = without(event, RESPONSES) | {"item": item(without(event["item"], RESPONSES))}
        found.append(without(event, RESPONSES))
    return found


@pytest.mark.parametrize("fields", RESPONSE_CASES.values(), ids=RESPONSE_CASES)
def test_a_whole_response_is_vllms_own(server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]) -> None:
    body = responses_body(fields)
    assert response(ask(gateway.url, "/v1/responses", body)) == response(ask(server.url, "/v1/responses", body))


@pytest.mark.parametrize("fields", RESPONSE_CASES.values(), ids=RESPONSE_CASES)
def test_the_events_of_a_response_are_vllms_own(
    server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    body = responses_body(fields)
    through, direct = (response_events(events(one.url, "/v1/responses", body)) for one in (gateway, server))
    assert through == direct
