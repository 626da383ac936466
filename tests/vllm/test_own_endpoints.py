"""Messages and Responses through the gateway are what vLLM's own endpoints answer, except for documented differences.

Sampling is greedy in float32, so texts are equal. Answers that call tools are forced by a grammar: the model has random
weights.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gateway_process import GatewayProcess
from support.own_endpoints import (
    HELLO,
    ask,
    events,
    joined,
    message,
    message_events,
    messages_body,
    response,
    response_events,
    responses_body,
)
from support.serving import get, post
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
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


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    scratch = tmp_path_factory.mktemp("own")
    copy = scratch / "model"
    shutil.copytree(model, copy)
    tokenizer = copy / "tokenizer.json"
    # vLLM's Responses API adds the tokenizer's own BOS to that of the chat template. Without one, prompts are equal.
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "post_processor": None}))
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details")
    with VllmServer(copy, scratch / "vllm.log", *tools, VLLM_ENABLE_RESPONSES_API_STORE="1") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    worker = {"kind": "vllm", "name": "a", "url": server.url}
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), {"workers": [worker]}) as gateway:
        yield gateway


# -- Messages ----------------------------------------------------------------------------------------------------------


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


# -- stored responses --------------------------------------------------------------------------------------------------

FOLLOWING_CASES: dict[str, list[dict[str, Any]]] = {
    "text": [{}, {"input": "and now"}],
    "three turns": [{}, {"input": "and now"}, {"input": [HELLO]}],
    "instructions of the first": [{"instructions": "You are."}, {"input": "and now"}],
    "instructions of the second": [{}, {"instructions": "You are.", "input": "and now"}],
    "instructions of both": [{"instructions": "You are."}, {"instructions": "You were.", "input": "and now"}],
    "messages": [{"input": [HELLO, {"role": "assistant", "content": "hm"}, HELLO]}, {"input": [HELLO]}],
    "not stored": [{}, {"input": "and now", "store": False}],
}


def turns(url: str, cases: list[dict[str, Any]], *, streams: bool) -> Any:
    """The answers of a conversation, each of which follows on the one before. Ids of answers are drawn."""
    found, previous = [], None
    for fields in cases:
        body = responses_body({**fields, "previous_response_id": previous})
        if streams:
            stream = events(url, "/v1/responses", body)
            previous = stream[-1]["response"]["id"]
            found.append(response_events(stream))
        else:
            answer = ask(url, "/v1/responses", body)
            previous = answer["id"]
            found.append(response(answer))
    return found


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("cases", FOLLOWING_CASES.values(), ids=FOLLOWING_CASES)
def test_a_response_that_follows_on_another_is_vllms_own(
    server: VllmServer, gateway: GatewayProcess, cases: list[dict[str, Any]], streams: bool
) -> None:
    assert turns(gateway.url, cases, streams=streams) == turns(server.url, cases, streams=streams)


def test_function_calls_of_the_response_before_are_part_of_the_prompt(
    server: VllmServer, gateway: GatewayProcess
) -> None:
    """vLLM leaves them out, so it gets the whole conversation."""
    first = ask(gateway.url, "/v1/responses", responses_body(RESPONSE_CASES["named tool"]))
    called = {key: first["output"][0][key] for key in ("type", "call_id", "name", "arguments")}
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "rain"}
    fields = {"input": [result], "tools": [FUNCTION], "previous_response_id": first["id"]}
    through = ask(gateway.url, "/v1/responses", responses_body(fields))
    direct = ask(server.url, "/v1/responses", responses_body({"input": [HELLO, called, result], "tools": [FUNCTION]}))
    assert through["output"][0]["content"][0]["text"] == direct["output"][0]["content"][0]["text"]
    assert through["usage"]["input_tokens"] == direct["usage"]["input_tokens"]


def test_a_response_that_follows_on_none_is_not_found(server: VllmServer, gateway: GatewayProcess) -> None:
    body = responses_body({"previous_response_id": "resp_unknown"})
    assert [post(one.url, "/v1/responses", body)[0] for one in (gateway, server)] == [404, 404]


def test_a_stored_response_is_answered_again_as_vllm_does(server: VllmServer, gateway: GatewayProcess) -> None:
    for one in (gateway, server):
        answer = ask(one.url, "/v1/responses", responses_body({}))
        status, _, page = get(one.url, f"/v1/responses/{answer['id']}")
        assert status == 200
        assert response(page) == response(answer)
