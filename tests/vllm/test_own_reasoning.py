"""Reasoning through the gateway is what vLLM's own endpoints answer, except for documented differences."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gateway_process import GatewayProcess
from support.own_endpoints import (
    HELLO,
    ask,
    data_events,
    events,
    message,
    message_events,
    messages_body,
    response,
    response_events,
    responses_body,
)
from support.reasoning_model import ANSWERS, THINKS, make_reasoning_model
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
THOUGHT = {"type": "thinking", "thinking": "I thought", "signature": "s"}
TOOLS = [{"name": "lookup", "input_schema": CITY, "strict": True}]
MESSAGE_CASES: dict[str, dict[str, Any]] = {
    "thinks and answers": {},
    "ends while it thinks": {"max_tokens": 4},
    "ends with its thoughts": {"max_tokens": 11},
    "ends while it answers": {"max_tokens": 15},
    "disabled": {"thinking": {"type": "disabled"}},
    "adaptive": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    "stop sequence in its answer": {"stop_sequences": [" name"]},
    "earlier thoughts": {"messages": [HELLO, {"role": "assistant", "content": [THOUGHT]}, HELLO]},
    "earlier thoughts and an answer": {
        "messages": [
            HELLO,
            {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "It is so."}]},
            HELLO,
        ],
    },
    "thinks and calls a tool": {
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "lookup", "disable_parallel_tool_use": True},
        "max_tokens": 400,
    },
    "thinks and fills a schema": {
        "output_config": {"format": {"type": "json_schema", "schema": CITY}},
        "max_tokens": 400,
    },
}
FUNCTION = {"type": "function", "name": "lookup", "parameters": CITY, "strict": True}
REASONED = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I see"}]}
SAID = {"type": "message", "role": "assistant", "content": "It is so."}
RESPONSE_CASES: dict[str, dict[str, Any]] = {
    "thinks and answers": {},
    "ends while it thinks": {"max_output_tokens": 4},
    "ends with its thoughts": {"max_output_tokens": 11},
    "ends while it answers": {"max_output_tokens": 15},
    "effort": {"reasoning": {"effort": "low"}},
    "no effort": {"reasoning": {"effort": "none"}},
    "earlier thoughts": {"input": [HELLO, REASONED, SAID, HELLO]},
    "thinks and calls a tool": {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "lookup"},
        "parallel_tool_calls": False,
        "max_output_tokens": 400,
    },
    "thinks and fills a schema": {
        "text": {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}},
        "max_output_tokens": 400,
    },
}
CHAT_CASES: dict[str, dict[str, Any]] = {
    "thinks and answers": {},
    "ends while it thinks": {"max_tokens": 4},
    "reasoning left out": {"include_reasoning": False},
    "no effort": {"reasoning_effort": "none"},
    "earlier thoughts": {"messages": [HELLO, {"role": "assistant", "content": "hm", "reasoning": "I see"}, HELLO]},
    "earlier thoughts, the older name": {
        "messages": [HELLO, {"role": "assistant", "content": "hm", "reasoning_content": "I see"}, HELLO]
    },
    "budget": {"thinking_token_budget": 2},
    "the model writes the first tag": {"chat_template_kwargs": {"writes_tag": True}},
}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    scratch = tmp_path_factory.mktemp("reasoning")
    options = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    model = make_reasoning_model(model, scratch / "model")
    with VllmServer(model, scratch / "vllm.log", *options, "--enable-prompt-tokens-details") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    worker = {"kind": "vllm", "name": "a", "url": server.url}
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), {"workers": [worker]}) as gateway:
        yield gateway


def test_the_model_reasons(server: VllmServer) -> None:
    blocks = ask(server.url, "/v1/messages", messages_body({"max_tokens": 60}))["content"]
    assert [(one["type"], one.get("thinking") or one["text"]) for one in blocks] == [
        ("thinking", THINKS),
        ("text", ANSWERS),
    ]


@pytest.mark.parametrize("fields", MESSAGE_CASES.values(), ids=MESSAGE_CASES)
def test_thinking_of_a_whole_message_is_vllms_own(
    server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    body = messages_body({"max_tokens": 60, **fields})
    assert message(ask(gateway.url, "/v1/messages", body)) == message(ask(server.url, "/v1/messages", body))


@pytest.mark.parametrize("fields", MESSAGE_CASES.values(), ids=MESSAGE_CASES)
def test_the_events_of_thinking_are_vllms_own(
    server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    body = messages_body({"max_tokens": 60, **fields})
    through = message_events(events(gateway.url, "/v1/messages", body))
    assert through == message_events(events(server.url, "/v1/messages", body), is_complete=False)


@pytest.mark.parametrize("fields", RESPONSE_CASES.values(), ids=RESPONSE_CASES)
def test_reasoning_of_a_whole_response_is_vllms_own(
    server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    body = responses_body({"max_output_tokens": 60, **fields})
    assert response(ask(gateway.url, "/v1/responses", body)) == response(ask(server.url, "/v1/responses", body))


@pytest.mark.parametrize("fields", RESPONSE_CASES.values(), ids=RESPONSE_CASES)
def test_the_events_of_reasoning_are_vllms_own(
    server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    body = responses_body({"max_output_tokens": 60, **fields})
    through, direct = (response_events(events(one.url, "/v1/responses", body)) for one in (gateway, server))
    assert through == direct


def test_reasoning_of_the_response_before_is_part_of_the_prompt(server: VllmServer, gateway: GatewayProcess) -> None:
    """vLLM leaves it out, so it gets the whole conversation."""
    first = ask(gateway.url, "/v1/responses", responses_body({"max_output_tokens": 60}))
    assert [one["type"] for one in first["output"]] == ["reasoning", "message"]
    following = responses_body({"input": [HELLO], "previous_response_id": first["id"], "max_output_tokens": 60})
    whole = responses_body({"input": [HELLO, *first["output"], HELLO], "max_output_tokens": 60})
    through, direct = ask(gateway.url, "/v1/responses", following), ask(server.url, "/v1/responses", whole)
    assert through["usage"]["input_tokens"] == direct["usage"]["input_tokens"]
    assert response(through)["output"] == response(direct)["output"]


# -- chat --------------------------------------------------------------------------------------------------------------


def chat_body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 60, "temperature": 0, "messages": [HELLO], **fields}


@pytest.mark.parametrize("fields", CHAT_CASES.values(), ids=CHAT_CASES)
def test_reasoning_of_a_whole_chat_is_vllms_own(
    server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    through, direct = (ask(one.url, "/v1/chat/completions", chat_body(fields)) for one in (gateway, server))
    assert through["choices"] == direct["choices"]
    assert through["usage"] == direct["usage"]


@pytest.mark.parametrize("fields", CHAT_CASES.values(), ids=CHAT_CASES)
def test_the_pieces_of_reasoning_in_chat_are_vllms_own(
    server: VllmServer, gateway: GatewayProcess, fields: dict[str, Any]
) -> None:
    body = chat_body({"stream_options": {"include_usage": True}, **fields})
    through, direct = (pieces(data_events(one.url, "/v1/chat/completions", body)) for one in (gateway, server))
    assert through == direct


def test_a_whole_answer_has_the_reasoning_that_vllm_streams(server: VllmServer, gateway: GatewayProcess) -> None:
    """After reasoning in the prompt, vLLM takes a first tag that the model writes as text; in whole answers it does
    not.
    """
    messages = [HELLO, {"role": "assistant", "content": "hm", "reasoning": "I see"}, HELLO]
    body = chat_body({"messages": messages, "chat_template_kwargs": {"writes_tag": True}})
    texts, _, _ = pieces(data_events(server.url, "/v1/chat/completions", body))
    message = ask(gateway.url, "/v1/chat/completions", body)["choices"][0]["message"]
    assert message["content"] == texts["content"]
    assert message["reasoning"] is None
    assert ask(server.url, "/v1/chat/completions", body)["choices"][0]["message"]["reasoning"] == THINKS


def pieces(stream: list[dict[str, Any]]) -> Any:
    """The texts of a stream by field, its end and its usage."""
    texts: dict[str, str] = {}
    finish, usage = None, None
    for chunk in stream:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            for field, text in choice["delta"].items():
                texts[field] = texts.get(field, "") + (text or "")
    return texts, finish, usage
