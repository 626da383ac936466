"""Messages requests translated into chat requests."""

from typing import Any

import msgspec
import pytest

from inferry.domain.errors import GatewayError, InvalidRequest, UnsupportedFeature
from inferry.domain.ports import ModelCard
from inferry.ingress.anthropic.decode import MessagesEndpoint
from inferry.ingress.job_parser import body_for
from inferry.ingress.openai.features import features_of
from inferry.ingress.openai.request_schema import ChatCompletionRequest
from inferry.ingress.wire_format import ClientRequest

USER = {"role": "user", "content": "Hi"}
WEATHER = {"name": "weather", "description": "Looks outside.", "input_schema": {"type": "object", "properties": {}}}


def decode(**fields: Any) -> ClientRequest:
    request = {"model": "m", "max_tokens": 9, "messages": [USER], **fields}
    body = {name: value for name, value in request.items() if value is not None}
    return MessagesEndpoint().decode(msgspec.json.encode(body))


def chat(**fields: Any) -> dict[str, Any]:
    """The body that workers get."""
    found: dict[str, Any] = msgspec.json.decode(decode(**fields).body)
    return found


def messages(*turns: Any, system: Any = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(messages=list(turns), system=system)["messages"]
    return found


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def call(id: str = "t1", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "weather", "input": input}


def result(content: Any = None, id: str = "t1", **more: Any) -> dict[str, Any]:
    given = {} if content is None else {"content": content}
    return {"type": "tool_result", "tool_use_id": id, **given, **more}


def test_a_plain_request() -> None:
    request = decode(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], stream=True)
    assert msgspec.json.decode(request.body) == {
        "model": "m",
        "messages": [USER],
        "max_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stream": True,
    }
    wire = request.wire
    assert (wire.max_tokens, wire.stop, wire.temperature, wire.top_p, wire.top_k) == (9, ["END"], 0.5, 0.9, 7)
    assert wire.stream is True


def test_texts_keep_their_bytes() -> None:
    words = 'say "hi"\\\n\u00fc\U0001f600\x00'
    assert messages(user(text(words)), system=words) == [
        {"role": "system", "content": words},
        {"role": "user", "content": words},
    ]


def test_system_blocks_are_joined_and_the_billing_header_is_left_out() -> None:
    system = [text("x-anthropic-billing-header: cc_version=2.1.197.abc;"), text("You are"), text(""), text("an agent.")]
    assert messages(USER, system=system)[0] == {"role": "system", "content": "You are\n\nan agent."}
    assert messages(USER, system=system[:1]) == [USER]


def test_several_texts_stay_parts() -> None:
    assert messages(user(text("a"), text(""), text("b")))[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]


def test_turns_of_one_role_are_one_message() -> None:
    found = messages(USER, user(text("you")), assistant(text("a")), assistant(text("b")), USER)
    assert [one["role"] for one in found] == ["user", "assistant", "user"]
    assert [part["text"] for part in found[0]["content"]] == ["Hi", "you"]


def test_a_leading_system_turn_joins_the_system_message() -> None:
    found = messages({"role": "system", "content": "Be kind."}, USER, system="Be brief.")
    assert found == [{"role": "system", "content": "Be brief.\n\nBe kind."}, USER]


def test_a_later_system_turn_is_part_of_the_user_message_beside_it() -> None:
    late = {"role": "system", "content": [text("Use tools.")]}
    tagged = {"type": "text", "text": "<system>\nUse tools.\n</system>"}
    hi = {"type": "text", "text": "Hi"}
    assert messages(USER, late) == [{"role": "user", "content": [hi, tagged]}]
    found = messages(USER, assistant(text("Yes?")), late, USER)
    assert [one["role"] for one in found] == ["user", "assistant", "user"]
    assert found[2]["content"] == [tagged, hi]
    found = messages(USER, late, assistant(text("Yes?")), late, assistant(text("?")), late)
    assert [one["role"] for one in found] == ["user", "assistant"] * 2 + ["user"]


def test_tool_calls_and_results_are_chat_messages() -> None:
    found = messages(
        USER,
        assistant(text("Let me see."), call("t1", city="Zürich"), call("t2")),
        user(text("Go on."), result("rain", "t1"), result([text("a"), text("b")], "t2", is_error=True)),
    )
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Zürich"}'}},
                {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "t1"},
        {"role": "tool", "content": "Error: a\nb", "tool_call_id": "t2"},
        {"role": "user", "content": "Go on."},
    ]


def test_results_are_in_the_order_of_the_calls_of_their_turn() -> None:
    found = messages(
        USER,
        assistant(call("a"), call("b"), call("c")),
        user(result("C", "c"), result("A", "a"), result("B", "b")),
        assistant(call("b"), call("a")),
        user(result("A", "a"), result("of no call", "x"), result("B", "b")),
        assistant(call("d"), call("a")),
        user(result("of no call", "b"), result("D", "d"), result("A", "a")),
    )
    results = [one["content"] for one in found if one["role"] == "tool"]
    assert results == ["A", "B", "C", "B", "A", "of no call", "D", "A", "of no call"]


def test_a_result_may_be_empty() -> None:
    assert messages(USER, assistant(call()), user(result()))[2] == {
        "role": "tool",
        "content": "",
        "tool_call_id": "t1",
    }
    assert messages(USER, assistant(call()), user(result()))[1]["content"] is None


def test_thinking_is_passed_on_as_reasoning() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    found = messages(USER, assistant(thinking, {"type": "redacted_thinking", "data": "x"}, text("Yes?")), USER)
    assert found[1] == {"role": "assistant", "content": "Yes?", "reasoning_content": "Hm."}


def test_images_become_parts_and_a_feature_of_the_request() -> None:
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    request = decode(messages=[USER, assistant(call()), user(result([text("seen"), inline]), text("and"), linked)])
    found = msgspec.json.decode(request.body)["messages"]
    assert found[2] == {"role": "tool", "content": "seen", "tool_call_id": "t1"}
    assert found[3]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    ]
    assert request.features == [
        ("images", "messages[2].content[0].content[1].image"),
        ("images", "messages[2].content[2].image"),
    ]


def test_tools_become_functions_and_precede_the_messages() -> None:
    body = decode(tools=[WEATHER, {**WEATHER, "type": "custom", "strict": True, "cache_control": {}}]).body
    assert body.index(b'"tools"') < body.index(b'"messages"')
    plain, strict = msgspec.json.decode(body)["tools"]
    function = {"name": "weather", "description": "Looks outside.", "parameters": WEATHER["input_schema"]}
    assert plain == {"type": "function", "function": function}
    assert strict == {"type": "function", "function": {**function, "strict": True}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_tool_choices(choice: Any, expected: dict[str, Any]) -> None:
    found = chat(tools=[WEATHER], tool_choice=choice)
    assert {name: found[name] for name in ("tool_choice", "parallel_tool_calls") if name in found} == expected


def test_a_tool_choice_without_tools_is_left_out_where_it_asks_for_none() -> None:
    assert "tool_choice" not in chat(tool_choice={"type": "auto"})


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_an_output_format_becomes_a_response_format(where: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    request = decode(**{where: {"format": wanted, "effort": "high"} if where == "output_config" else wanted})
    assert msgspec.json.decode(request.body)["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }


def test_the_user_id_is_a_hint_for_affinity_and_stays_in_the_gateway() -> None:
    request = decode(metadata={"user_id": '{"session_id":"s"}'})
    assert request.wire.user == '{"session_id":"s"}'
    assert b"session_id" not in request.body


@pytest.mark.parametrize(("tier", "expected"), [(None, None), ("auto", None), ("standard_only", "default")])
def test_service_tiers(tier: str | None, expected: str | None) -> None:
    assert decode(service_tier=tier).wire.service_tier == expected


def test_fields_without_effect_are_accepted() -> None:
    body = decode(
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        cache_control={"type": "ephemeral"},
        container=None,
        mcp_servers=[],
        anything_new={"x": 1},
    ).body
    assert set(msgspec.json.decode(body)) == {"model", "messages", "max_tokens"}


def test_a_prefilled_answer_is_continued() -> None:
    request = decode(messages=[USER, assistant(text("The answer"), text(" is"))])
    body = msgspec.json.decode(request.body)
    assert body["messages"][-1] == {"role": "assistant", "content": "The answer is"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert isinstance(request.wire, ChatCompletionRequest)
    assert features_of(request.wire) == [("prefill", "continue_final_message")]


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_prefilled_answer_is_none(content: Any) -> None:
    request = decode(messages=[USER, {"role": "assistant", "content": content}])
    assert [one["role"] for one in msgspec.json.decode(request.body)["messages"]] == ["user"]
    assert b"continue_final_message" not in request.body


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 4000}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        (
            {"thinking": {"type": "disabled"}},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ],
)
def test_reasoning_is_controlled_where_the_model_has_the_feature(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = decode(**fields)
    plain = msgspec.json.decode(request.body)
    assert set(plain) == {"model", "messages", "max_tokens"}
    assert body_for(request, ModelCard(name="m")) == request.body
    able = ModelCard(name="m", features=frozenset({"reasoning_effort"}))
    assert msgspec.json.decode(body_for(request, able)) == plain | expected


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"max_tokens": None}, InvalidRequest, "max_tokens"),
        ({"model": None}, InvalidRequest, "model"),
        ({"messages": []}, InvalidRequest, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, InvalidRequest, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, InvalidRequest, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, InvalidRequest, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, InvalidRequest, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, InvalidRequest, "messages[0].role"),
        ({"messages": [user({"type": "text", "text": 7})]}, InvalidRequest, "messages[0].content[0].text"),
        ({"messages": [user({"type": "text"})]}, InvalidRequest, "messages[0].content[0].text"),
        ({"messages": [user({"text": "a"})]}, InvalidRequest, "messages[0].content[0].type"),
        ({"messages": [user({"type": "image"})]}, InvalidRequest, "messages[0].content[0].source"),
        ({"messages": [user({"type": "tool_result"})]}, InvalidRequest, "messages[0].content[0].tool_use_id"),
        ({"messages": [USER, assistant({"type": "tool_use"}), USER]}, InvalidRequest, "messages[1].content[0]"),
        ({"messages": [USER, assistant(text("I"), call())]}, UnsupportedFeature, "messages"),
        ({"messages": [USER, assistant({"type": "thinking", "thinking": "Hm."})]}, UnsupportedFeature, "messages"),
        ({"messages": [user({"type": "document", "source": {"type": "text"}})]}, UnsupportedFeature, None),
        ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, UnsupportedFeature, None),
        ({"messages": [USER, assistant({"type": "server_tool_use"}), USER]}, UnsupportedFeature, None),
        ({"system": [{"type": "image"}]}, UnsupportedFeature, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, UnsupportedFeature, "tools[0]"),
        ({"tools": [{"name": "a"}]}, InvalidRequest, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, InvalidRequest, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, InvalidRequest, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, InvalidRequest, "tool_choice.name"),
        ({"container": "c"}, UnsupportedFeature, "container"),
        ({"mcp_servers": [{"type": "url"}]}, UnsupportedFeature, "mcp_servers"),
        ({"stop_sequences": [""]}, InvalidRequest, "stop_sequences"),
        ({"service_tier": "flex"}, InvalidRequest, "service_tier"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(
    fields: dict[str, Any], kind: type[GatewayError], param: str | None
) -> None:
    with pytest.raises(kind) as refused:
        decode(**fields)
    if param is not None:
        assert refused.value.param == param
        assert param in refused.value.message


def test_server_tools_are_named() -> None:
    with pytest.raises(UnsupportedFeature, match="web_search_20250305"):
        decode(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(UnsupportedFeature, match="document"):
        decode(messages=[user({"type": "document"})])
