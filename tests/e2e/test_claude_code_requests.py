"""Requests as Claude Code sends them, without Claude Code: headers, betas, 24 tools and a system turn at the end."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.chat_script import WEATHER_CALLS
from support.http_gateway import HttpGateway
from support.tenant_gateway import Answer
from support.upstream import well_behaved

BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,effort-2025-11-24,advanced-tool-use-2025-11-20,fine-grained-tool-streaming-2025-05-14"
)
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    config = {"server": {"max_body_bytes": 300_000}}
    with HttpGateway(tmp_path_factory.mktemp("claude-code"), config=config) as serving:
        yield serving


@pytest.fixture(scope="module")
def key(gateway: HttpGateway) -> str:
    return gateway.key("acme")


def tool(number: int) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string", "description": "what to run"}},
        "required": ["command"],
        "additionalProperties": False,
    }
    return {
        "name": f"Tool{number}",
        "description": "Does one thing. " * 20,
        "input_schema": schema,
        "eager_input_streaming": True,
    }


def request(*turns: Any, build: str = "abc", **more: Any) -> dict[str, Any]:
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197.{build}; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "\nYou are an interactive agent. " * 50, "cache_control": EPHEMERAL},
    ]
    blocks = [
        {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>\n"},
        {"type": "text", "text": "hi", "cache_control": EPHEMERAL},
    ]
    return {
        "model": "m",
        "messages": [{"role": "user", "content": blocks}, *turns],
        "system": system,
        "tools": [tool(number) for number in range(24)],
        "metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s-1"})},
        "max_tokens": 2000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **more,
    }


def send(gateway: HttpGateway, key: str, body: Any, session: str = "s-1", **more: str) -> Answer:
    headers = {
        "accept": "application/json",
        "anthropic-beta": BETAS,
        "anthropic-dangerous-direct-browser-access": "true",
        "anthropic-version": "2023-06-01",
        "authorization": f"Bearer {key}",
        "x-api-key": key,
        "x-app": "cli",
        "x-stainless-retry-count": "0",
        "x-claude-code-session-id": session,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return gateway.call("POST", "/v1/messages?beta=true", body, headers)


def test_the_first_request_of_a_session(gateway: HttpGateway, key: str) -> None:
    gateway.upstream.script = well_behaved
    assert gateway.call("HEAD", "/").status == 200
    late = {"role": "system", "content": [{"type": "text", "text": "Use the tools."}]}
    answer = send(gateway, key, request(late))
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    sent = gateway.upstream.bodies[-1]
    assert [one["role"] for one in sent["messages"]] == ["system", "user"]
    assert "billing" not in json.dumps(sent)
    assert sent["messages"][1]["content"][-1]["text"] == "<system>\nUse the tools.\n</system>"
    assert len(sent["tools"]) == 24
    assert not {"thinking", "context_management", "output_config", "metadata", "user"} & set(sent)


def test_prompts_of_two_sessions_begin_alike(gateway: HttpGateway, key: str) -> None:
    gateway.upstream.script = well_behaved
    for session, build in (("s-1", "abc"), ("s-2", "def")):
        assert send(gateway, key, request(build=build), session).status == 200
    first, second = gateway.upstream.bodies[-2:]
    assert first["messages"] == second["messages"]
    assert first["tools"] == second["tools"]


def test_a_turn_with_tool_results_and_thinking(gateway: HttpGateway, key: str) -> None:
    gateway.upstream.script = WEATHER_CALLS
    answer = send(gateway, key, request(), x_claude_code_agent_id="explorer")
    assert answer.status == 200, answer.body
    assert b'"type":"tool_use","id":"call-a"' in answer.body
    gateway.upstream.script = well_behaved
    turns = [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "s"},
                {"type": "text", "text": "Let me look."},
                {
                    "type": "tool_use",
                    "id": "call-a",
                    "name": "Tool1",
                    "input": {"command": "ls"},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "tool_use_id": "call-a",
                    "type": "tool_result",
                    "content": "<tool_use_error>no</tool_use_error>",
                    "is_error": True,
                    "cache_control": EPHEMERAL,
                },
            ],
        },
        {"role": "system", "content": "Be careful."},
    ]
    assert send(gateway, key, request(*turns)).status == 200
    roles = [one["role"] for one in gateway.upstream.bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "user"]


def test_its_session_is_a_run_and_its_sub_agents_are_sub_runs(gateway: HttpGateway, key: str) -> None:
    gateway.upstream.script = well_behaved
    send(gateway, key, request(), "s-9")
    send(gateway, key, request(), "s-9", x_claude_code_agent_id="a1")
    run = gateway.call("GET", "/v1/runs/claude-code%3As-9", headers={"x-api-key": key}).json
    assert run["sub_runs"] == ["claude-code:s-9/a1"]


def test_the_repeat_without_streaming_after_a_failure_is_answered(gateway: HttpGateway, key: str) -> None:
    gateway.upstream.script = well_behaved
    answer = send(gateway, key, request(stream=False))
    assert answer.status == 200
    assert answer.json["content"] == [{"type": "text", "text": "Hello world"}]


def test_sub_paths_and_other_methods_are_refused_in_anthropics_shape(gateway: HttpGateway, key: str) -> None:
    for method, path, status in (
        ("POST", "/v1/messages/nope", 404),
        ("GET", "/v1/messages", 405),
        ("GET", "/v1/messages/count_tokens", 405),
        ("POST", "/v1/messages", 400),
    ):
        answer = gateway.call(method, path, b"{", {"x-api-key": key})
        assert (answer.status, answer.json["type"]) == (status, "error"), path
        assert answer.headers["request-id"] == answer.json["request_id"]
    assert gateway.call("POST", "/v1/messages", b"{}", {"x-api-key": "wrong"}).json["error"]["type"] == (
        "authentication_error"
    )


def test_a_body_that_is_too_large_is_413(gateway: HttpGateway, key: str) -> None:
    answer = send(gateway, key, request({"role": "user", "content": "a" * 300_000}))
    assert (answer.status, answer.json["error"]["type"]) == (413, "request_too_large")
