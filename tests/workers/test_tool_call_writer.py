"""Text with tool calls to the events of a chat stream, however the text is split."""

import json
import random
from typing import Any

import pytest

from inferry.domain.constraints import Constraint, ToolSpec
from inferry.domain.streams import FinishReason, Usage
from inferry.domain.workers import ToolFormatName
from inferry.engine.tool_formats import format_named
from inferry.ingress.openai.collect import collect_events
from inferry.workers.in_process.tool_calls import ToolCallWriter
from support.engine_fixtures import a_job

TOOLS = (ToolSpec("f", "{}"), ToolSpec("f.two", "{}"))
ARGUMENTS = [{"a": 'br{ce" \\ ]'}, {}, {"list": [[1], {"deep": None}], "ü": "}}"}]
NAMES = ["f", "f.two", "f"]
BEGIN_ID = 5


def a_writer(name: ToolFormatName, *, must_call: bool = False, special: bool = False) -> ToolCallWriter:
    form = format_named(name, {"[TOOL_CALLS]": BEGIN_ID} if special else {})
    return ToolCallWriter(a_job("job", [1]), Constraint("tools", tools=TOOLS, must_call=must_call), form, 17.0)


def an_answer(name: ToolFormatName, calls: int) -> str:
    form = format_named(name, {})
    pairs = zip(NAMES[:calls], ARGUMENTS, strict=False)
    return form.text_of([f"{form.call_start(one)}{json.dumps(given)}}}" for one, given in pairs])


def collected(writer: ToolCallWriter, pieces: list[tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Any], list[Any]]:
    raw = b"".join(writer.push(text, ids) for text, ids in pieces)
    raw += writer.finish(FinishReason.TOOL_CALLS, None)
    body = collect_events(raw, writer.usage(Usage(3, 0, 4)))
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line]
    message: dict[str, Any] = body["choices"][0]["message"]
    return message, events


def in_pieces(text: str, seed: int) -> list[tuple[str, tuple[int, ...]]]:
    generator = random.Random(seed)
    pieces: list[tuple[str, tuple[int, ...]]] = []
    while text:
        size = generator.choice([1, 2, 7, 30])
        pieces.append((text[:size], ()))
        text = text[size:]
    return pieces


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "calls"), [("hermes", 1), ("hermes", 3), ("mistral", 1), ("mistral", 3), ("llama3_json", 1)]
)
@pytest.mark.parametrize("must_call", [False, True])
def test_calls_are_found_however_the_text_is_split(
    name: ToolFormatName, calls: int, must_call: bool, seed: int
) -> None:
    before = "" if must_call or name == "llama3_json" else "I look < it [up.\n"
    writer = a_writer(name, must_call=must_call)
    message, events = collected(writer, in_pieces(before + an_answer(name, calls), seed))
    assert (message["content"] or "") == before
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert found == list(zip(NAMES[:calls], ARGUMENTS, strict=False))
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == calls
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert writer.has_calls
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["id"] == "chatcmpl-job"


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json"])
@pytest.mark.parametrize("text", ["plain text", "a <tool_cal", '{"name": "other"}', "[TOOL", '{"na', "<"])
def test_text_without_a_call_is_content(name: ToolFormatName, text: str) -> None:
    for seed in range(3):
        writer = a_writer(name)
        message, _ = collected(writer, in_pieces(text, seed))
        assert message["content"] == text
        assert not writer.has_calls


def test_text_is_not_held_back_longer_than_needed() -> None:
    writer = a_writer("hermes")
    assert b'"content":"Hello "' in writer.push("Hello <tool", ())
    assert b'"content":"<tools"' in writer.push("s", ())


def test_arguments_are_written_as_they_come() -> None:
    writer = a_writer("hermes", must_call=True)
    writer.push('<tool_call>\n{"name": "f", "arguments": ', ())
    assert json.loads(writer.push('{"a": "x', ())[6:])["choices"][0]["delta"] == {
        "tool_calls": [{"index": 0, "function": {"arguments": '{"a": "x'}}]
    }


def test_a_special_token_begins_the_calls_of_mistral() -> None:
    text = an_answer("mistral", 2).removeprefix("[TOOL_CALLS]")
    writer = a_writer("mistral", special=True)
    message, _ = collected(writer, [("So ", (9,)), ("[x] ", (8,)), ("", (BEGIN_ID,)), *in_pieces(text, 1)])
    assert message["content"] == "So [x] "
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "f.two"]


def test_a_call_that_is_cut_keeps_what_was_written() -> None:
    writer = a_writer("hermes", must_call=True)
    raw = writer.push('<tool_call>\n{"name": "f", "arguments": {"a": [1', ())
    raw += writer.finish(FinishReason.LENGTH, None)
    choice = collect_events(raw, b"")["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": [1'
