"""Responses requests translated into chat requests."""

from typing import Any

import msgspec
import pytest

from inferry.domain.errors import GatewayError, InvalidRequest, UnsupportedFeature
from inferry.ingress.openai.features import features_of
from inferry.ingress.responses.conversation import sealed_reasoning
from inferry.ingress.responses.endpoint import ResponsesEndpoint
from inferry.ingress.wire_format import ClientRequest
from support import codex_request
from support.codex_request import function, message

USER = {"role": "user", "content": "Hi"}


def decode(**fields: Any) -> ClientRequest:
    request = {"model": "m", "input": "Hi", **fields}
    body = {name: value for name, value in request.items() if value is not None}
    found = ResponsesEndpoint(lambda: 1.0).decode(msgspec.json.encode(body))
    assert isinstance(found, ClientRequest)
    return found


def chat(**fields: Any) -> dict[str, Any]:
    """The body that workers get."""
    found: dict[str, Any] = msgspec.json.decode(decode(**fields).body)
    return found


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(input=list(items), **fields)["messages"]
    return found


def refusal(**fields: Any) -> GatewayError:
    with pytest.raises(GatewayError) as refused:
        decode(**fields)
    return refused.value


def call(id: str = "c1", name: str = "weather", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments, **more}


def output(text: Any = "rain", id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": text}


def test_a_plain_request() -> None:
    request = decode(
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        reasoning={"effort": "low"},
        service_tier="flex",
        user="u",
        prompt_cache_key="k",
        metadata={"a": "b"},
    )
    assert msgspec.json.decode(request.body) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, USER],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "reasoning_effort": "low",
    }
    wire = request.wire
    assert (wire.max_tokens, wire.temperature, wire.top_p, wire.stream) == (9, 0.5, 0.9, True)
    assert (wire.service_tier, wire.user, wire.prompt_cache_key) == ("flex", "u", "k")


def test_items_become_turns() -> None:
    found = messages(
        {"role": "developer", "content": "Be brief."},
        message("user", "Hi", "there"),
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        call("c1", arguments='{"city":"Bern"}'),
        call("c2"),
        output("rain", "c1"),
        output([{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "wind"}], "c2"),
        {"role": "assistant", "content": "It rains."},
        {"role": "developer", "content": "Be polite."},
        {"role": "user", "content": "Thanks"},
        instructions="You are a clerk.",
    )
    assert found == [
        {"role": "system", "content": "You are a clerk.\n\nBe brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}},
                {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "sun\nwind", "tool_call_id": "c2"},
        {"role": "assistant", "content": "It rains."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system>\nBe polite.\n</system>"},
                {"type": "text", "text": "Thanks"},
            ],
        },
    ]


def test_reasoning_goes_back_where_it_can_be_read() -> None:
    def reasoning(encrypted: str) -> list[dict[str, Any]]:
        item = {"type": "reasoning", "summary": [], "encrypted_content": encrypted}
        return messages(USER, item, {"role": "assistant", "content": "Yes."}, USER)

    assert reasoning(sealed_reasoning("Häm."))[1]["reasoning_content"] == "Häm."
    assert "reasoning_content" not in reasoning("gAAAA-of-another-provider")[1]
    changed = {"type": "reasoning", "encrypted_content": "inferry:%%%"}
    assert isinstance(refusal(input=[USER, changed]), InvalidRequest)


def test_functions() -> None:
    body = chat(
        tools=[function("weather", city="string"), {"type": "function", "name": "time"}],
        tool_choice={"type": "function", "name": "time"},
        parallel_tool_calls=False,
    )
    weather, time = body["tools"]
    assert weather["type"] == "function"
    assert weather["function"]["parameters"]["properties"] == {"city": {"type": "string"}}
    assert (weather["function"]["strict"], weather["function"]["description"]) == (False, "Does weather.")
    assert time["function"] == {"name": "time", "parameters": {"type": "object", "properties": {}}}
    assert body["tool_choice"] == {"type": "function", "function": {"name": "time"}}
    assert body["parallel_tool_calls"] is False
    assert list(body)[:3] == ["model", "tools", "messages"]
    assert features_of(decode(tools=[function("weather")]).wire) == [("tools", "tools")]


def test_a_namespace_becomes_functions_with_its_name() -> None:
    body = chat(
        input=[USER, call(name="spawn_agent", namespace="multi_agent_v1"), output()], tools=[codex_request.AGENTS]
    )
    close, spawn = (one["function"] for one in body["tools"])
    assert (close["name"], spawn["name"]) == ("multi_agent_v1__close_agent", "multi_agent_v1__spawn_agent")
    assert "Tools for spawning and managing sub-agents." in close["description"]
    assert spawn["description"] == "Does spawn_agent."
    assert body["messages"][1]["tool_calls"][0]["function"]["name"] == "multi_agent_v1__spawn_agent"


def test_a_custom_tool_becomes_a_function_with_one_argument() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
    tool = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar}
    used = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'say "x"'}
    body = chat(
        input=[USER, used, {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}],
        tools=[tool],
        tool_choice={"type": "custom", "name": "apply_patch"},
    )
    found = body["tools"][0]["function"]
    assert found["parameters"]["required"] == ["input"]
    assert "start: /x+/" in found["description"]
    made = body["messages"][1]["tool_calls"][0]["function"]
    assert msgspec.json.decode(made["arguments"]) == {"input": 'say "x"'}
    assert body["messages"][2] == {"role": "tool", "content": "done", "tool_call_id": "c1"}


def test_allowed_tools_are_the_only_ones() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    body = chat(tools=[function("a"), function("b")], tool_choice=choice)
    assert [one["function"]["name"] for one in body["tools"]] == ["b"]
    assert body["tool_choice"] == "required"


def test_web_search_is_left_out_and_named() -> None:
    request = decode(tools=[function("a"), {"type": "web_search"}, {"type": "web_search_preview_2025_03_11"}])
    assert len(msgspec.json.decode(request.body)["tools"]) == 1
    assert b"x-inferry-tools-left-out: web_search, web_search_preview_2025_03_11\r\n" in request.format.id_headers("r")
    assert "tools" not in chat(tools=[{"type": "web_search"}], tool_choice="auto")
    assert b"left-out" not in decode(tools=[function("a")]).format.id_headers("r")


def test_formats_of_text() -> None:
    schema = {"type": "object", "properties": {}}
    wanted = {"type": "json_schema", "name": "ticket", "schema": schema, "strict": True, "description": "A ticket."}
    assert chat(text={"format": wanted, "verbosity": "low"}) == {
        "model": "m",
        "messages": [USER],
        "verbosity": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "ticket", "schema": schema, "description": "A ticket.", "strict": True},
        },
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat(text={"format": {"type": "text"}})
    assert features_of(decode(text={"format": wanted}).wire) == [("structured_outputs", "response_format")]


def test_media_are_features_that_a_model_may_lack() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    file = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"}
    audio = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    request = decode(input=[{"role": "user", "content": [image, file, audio]}])
    assert request.features == [
        ("images", "input[0].content[0].image_url"),
        ("files", "input[0].content[1].file_data"),
        ("audio_input", "input[0].content[2].input_audio"),
    ]
    (found,) = msgspec.json.decode(request.body)["messages"]
    assert found["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"}},
        audio,
    ]


def test_log_probabilities_are_those_of_chat() -> None:
    included = ["message.output_text.logprobs"]
    assert chat(include=included) == {"model": "m", "messages": [USER], "logprobs": True}
    request = decode(include=included, top_logprobs=3)
    body = msgspec.json.decode(request.body)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)
    assert features_of(request.wire) == [("logprobs", "logprobs")]
    assert "logprobs" not in chat(top_logprobs=0)


def test_the_request_of_codex() -> None:
    request = decode(**codex_request.request())
    body = msgspec.json.decode(request.body)
    assert [one["role"] for one in body["messages"]] == ["system", "user"]
    assert body["messages"][0]["content"].startswith("You are a coding agent")
    assert [one["text"] for one in body["messages"][1]["content"]][-1] == "say hi"
    names = [one["function"]["name"] for one in body["tools"]]
    assert names == ["exec_command", "multi_agent_v1__close_agent", "multi_agent_v1__spawn_agent"]
    assert (body["tool_choice"], body["parallel_tool_calls"], body["stream"]) == ("auto", True, True)
    assert request.wire.prompt_cache_key == codex_request.THREAD


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.input_image.image_url"]}, "include"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0]"),
        ({"tools": [function("a")], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "input[0].content[0]"),
    ],
)
def test_what_no_engine_here_can_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert isinstance(error, UnsupportedFeature)
    assert error.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"text": "a"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "clown", "content": "a"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"instructions": 7}, "instructions"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "include": ["reasoning.encrypted_content"]}, "top_logprobs"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [function("a"), function("a")]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [function("a")], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
)
def test_invalid_requests_name_what_is_wrong(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
