"""Structured outputs and tool calls of the embedded engine, through the official clients. The weights are random."""

import contextlib
import json
import logging
from typing import Any, Literal

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from support.serving import Serving, get

TICKET = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["billing", "bug", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["intent", "urgency", "tags"],
    "additionalProperties": False,
}
LOOK_UP = {
    "type": "object",
    "properties": {"order": {"type": "integer", "minimum": 0, "maximum": 999}, "why": {"enum": ["refund", "status"]}},
    "required": ["order", "why"],
    "additionalProperties": False,
}
HELLO: Any = [{"role": "user", "content": "I was charged twice for order 7."}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "look_up", "description": "Find an order.", "parameters": LOOK_UP}},
    {"type": "function", "function": {"name": "close"}},
]


class Ticket(BaseModel):
    intent: Literal["billing", "bug", "other"]
    urgency: int
    tags: list[str]


@pytest.fixture
def api(real: Serving) -> Any:
    with OpenAI(base_url=real.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(real: Serving) -> Any:
    with Anthropic(base_url=real.url, api_key="unused", max_retries=0) as client:
        yield client


def check_call(name: str, arguments: object) -> None:
    if name == "look_up":
        assert isinstance(arguments, dict)
        assert sorted(arguments) == ["order", "why"]
        assert 0 <= arguments["order"] <= 999
        assert arguments["why"] in ("refund", "status")
    else:
        assert (name, arguments) == ("close", {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_json_schema_holds_for_random_weights(api: OpenAI, stream: bool, strict: bool) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "t", "schema": TICKET, "strict": strict}}
    for seed in range(3):
        if stream:
            events = list(
                api.chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=300, seed=seed, response_format=wanted, stream=True
                )
            )
            text = "".join(event.choices[0].delta.content or "" for event in events)
            finish = events[-1].choices[0].finish_reason
        else:
            answer = api.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=300, seed=seed, response_format=wanted
            )
            text, finish = str(answer.choices[0].message.content), answer.choices[0].finish_reason
        ticket = Ticket.model_validate_json(text)
        assert 1 <= ticket.urgency <= 5
        assert finish == "stop"


def test_the_sdk_parses_an_answer_into_a_model(api: OpenAI) -> None:
    answer = api.chat.completions.parse(model="tiny", messages=HELLO, max_tokens=600, seed=1, response_format=Ticket)
    assert isinstance(answer.choices[0].message.parsed, Ticket) or answer.choices[0].finish_reason == "length"


def test_an_answer_that_its_limit_cuts_says_so(api: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "t", "schema": TICKET}}
    answer = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, response_format=wanted)
    assert answer.choices[0].finish_reason == "length"
    assert str(answer.choices[0].message.content).startswith("{")


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "a{2}b|c"}}, {"aab", "c"}),
        ({"guided_regex": "a{2}b|c"}, {"aab", "c"}),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, {"x", "y"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
    ],
)
def test_the_fields_of_vllm_are_enforced(api: OpenAI, extra: dict[str, Any], allowed: set[str]) -> None:
    answer = api.completions.create(model="tiny", prompt="Hello", max_tokens=8, extra_body=extra)
    assert answer.choices[0].text in allowed
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_required_tool_is_called_with_valid_arguments(api: OpenAI, choice: Any) -> None:
    answer = api.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=300,
        seed=2,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    check_call(call.function.name, json.loads(call.function.arguments))
    if choice != "required":
        assert call.function.name == "look_up"


def test_streamed_calls_are_those_of_the_whole_answer(api: OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 300, "seed": 5, "tools": TOOLS}
    whole = api.chat.completions.create(**options, tool_choice="required").choices[0]
    with api.chat.completions.stream(
        **options, tool_choice="required", stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    streamed = final.choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert whole.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls] == [
        (c.function.name, c.function.arguments) for c in whole.message.tool_calls
    ]
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 1
    assert final.usage is not None
    assert final.usage.completion_tokens > 1


def test_a_conversation_with_calls_and_results_continues(api: OpenAI) -> None:
    messages: Any = [*HELLO]
    for turn in range(3):
        answer = api.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=300,
            seed=turn,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        assert message.tool_calls
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"})
    free = api.chat.completions.create(model="tiny", messages=messages, max_tokens=5, tools=TOOLS, tool_choice="none")
    assert free.choices[0].message.tool_calls is None
    assert free.choices[0].message.content


def test_a_model_that_may_call_writes_text_as_well(api: OpenAI) -> None:
    alone = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=3, tools=TOOLS)
    assert alone.choices[0].message.content
    assert alone.choices[0].finish_reason == "length"
    events = list(
        api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=3, tools=TOOLS, stream=True)
    )
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == alone.choices[0].message.content
    assert events[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_use_of_the_messages_api(claude: Anthropic, stream: bool) -> None:
    tools: Any = [{"name": "look_up", "input_schema": LOOK_UP}, {"name": "close", "input_schema": {"type": "object"}}]
    options: Any = {
        "model": "tiny",
        "max_tokens": 300,
        "messages": HELLO,
        "tools": tools,
        "tool_choice": {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True},
    }
    if stream:
        with claude.messages.stream(**options) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**options)
    (block,) = message.content
    assert block.type == "tool_use"
    check_call(block.name, block.input)
    assert message.stop_reason == "tool_use"
    counted = claude.messages.count_tokens(model="tiny", messages=HELLO, tools=tools)
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("stream", [False, True])
def test_function_calls_of_the_responses_api(api: OpenAI, stream: bool) -> None:
    options: Any = {
        "model": "tiny",
        "input": "I was charged twice.",
        "max_output_tokens": 300,
        "tools": [{"type": "function", "name": "look_up", "parameters": LOOK_UP, "strict": True}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "store": False,
    }
    if stream:
        with api.responses.stream(**options) as events:
            list(events)
            response: Any = events.get_final_response()
    else:
        response = api.responses.create(**options)
    (item,) = response.output
    assert item.type == "function_call"
    check_call(item.name, json.loads(item.arguments))
    assert response.status == "completed"


def test_text_formats_of_the_responses_api(api: OpenAI) -> None:
    response = api.responses.create(
        model="tiny",
        input="I was charged twice.",
        max_output_tokens=300,
        text={"format": {"type": "json_schema", "name": "t", "schema": TICKET, "strict": True}},
        store=False,
    )
    Ticket.model_validate_json(response.output_text)


def test_structured_outputs_of_the_messages_api(claude: Anthropic) -> None:
    message = claude.messages.create(
        model="tiny",
        max_tokens=300,
        messages=HELLO,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": TICKET}}},
    )
    assert message.content[0].type == "text"
    Ticket.model_validate_json(message.content[0].text)


@pytest.mark.parametrize(
    ("schema", "param", "code"),
    [
        ({"type": "objekt"}, "response_format.json_schema.schema.type", "invalid_request"),
        (
            {"type": "object", "properties": {"a": {"anyOf": [{"not": {}}]}}},
            "response_format.json_schema.schema.properties.a.anyOf[0].not",
            "unsupported_feature",
        ),
        ({"$ref": "http://other/schema"}, "response_format.json_schema.schema.$ref", "invalid_request"),
        ({"type": "string", "pattern": "(a"}, "response_format", "invalid_request"),
        ({"$ref": "#/$defs/none"}, "response_format", "invalid_request"),
        ({"$ref": "#"}, "response_format", "invalid_request"),
        ({"type": "integer", "multipleOf": 1_000_000_007}, "response_format", "invalid_request"),
    ],
)
def test_an_invalid_schema_is_refused_by_name(api: OpenAI, schema: Any, param: str, code: str) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema, "strict": True}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            list(
                api.chat.completions.create(
                    model="tiny", messages=HELLO, max_tokens=9, response_format=wanted, stream=stream
                )
            )
        assert (refused.value.code, refused.value.param) == (code, param)
    # The engine goes on.
    api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "open"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "look_up"}}}, "tool_choice"),
        ({"functions": [{"name": "a"}]}, "functions"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}, *HELLO]},
            "messages[0].tool_calls",
        ),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"guided_regex": "a" * 2_001}, "guided_regex"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
    ],
)
def test_an_invalid_constraint_is_refused_by_name(api: OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=9, extra_body=fields)
    assert refused.value.param == param


def test_schemas_and_tools_are_in_no_log_and_no_metric(
    real: Serving, api: OpenAI, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "inferry")
    canary = "canary-7ab31"
    for extra in (
        {"guided_choice": [canary]},
        {"guided_regex": f"({canary}"},
        {"guided_grammar": f"start: {canary} ("},
    ):
        with contextlib.suppress(openai.BadRequestError):
            api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=9, extra_body=extra)
    assert canary not in caplog.text
    assert canary not in "".join(capfd.readouterr())
    assert canary not in get(real.url, "/metrics")[2]
