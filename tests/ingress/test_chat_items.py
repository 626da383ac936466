"""Chunks and answers of chat completions read as items."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.errors import WorkerLost
from inferry.domain.streams import Delta
from inferry.ingress.chat_items import (
    Arguments,
    Item,
    ItemReader,
    Reasoning,
    Refusal,
    Text,
    ToolCall,
    read_answer,
)
from inferry.ingress.openai.collect import collect_events
from support.upstream import DONE, chunk, event, role


def delta(raw: bytes = b"", text: str = "") -> Delta:
    return Delta("j", "r", "s", 0, text, (), 1, raw)


def piece(finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": fields, "logprobs": None, "finish_reason": finish}
    return event({"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def call(index: int | None = 0, id: str | None = None, **function: Any) -> bytes:
    fields = {"index": index, "id": id, "type": "function" if id else None, "function": function}
    return piece(tool_calls=[{name: value for name, value in fields.items() if value is not None}])


def read(*events: bytes) -> list[Item]:
    reader = ItemReader()
    return [item for one in events for item in reader.read(delta(one))]


def merged(items: list[Item]) -> list[Item]:
    """Adjacent pieces of one kind joined."""
    found: list[Any] = []
    for item in items:
        last = found[-1] if found else None
        if isinstance(item, Arguments) and isinstance(last, Arguments) and last.index == item.index:
            found[-1] = Arguments(item.index, last.text + item.text)
        elif isinstance(item, Text | Reasoning | Refusal) and type(item) is type(last):
            found[-1] = type(item)(last.text + item.text)
        else:
            found.append(item)
    return found


def test_the_role_alone_and_the_end_are_no_items() -> None:
    assert read(role(), piece("stop"), DONE, b": waiting\n\n") == []


def test_text_reasoning_and_refusals_are_items() -> None:
    assert read(piece(reasoning="hm"), piece(reasoning_content="so"), chunk("Hi"), piece(refusal="no")) == [
        Reasoning("hm"),
        Reasoning("so"),
        Text("Hi"),
        Refusal("no"),
    ]


def test_an_engine_that_repeats_its_reasoning_under_two_names_is_read_once() -> None:
    assert read(piece(reasoning="hm", reasoning_content="hm")) == [Reasoning("hm")]


def test_text_without_events_follows_events() -> None:
    reader = ItemReader()
    assert reader.read(delta(chunk("a"), "b")) == [Text("a"), Text("b")]


def test_parallel_tool_calls_have_numbers_of_their_own() -> None:
    assert read(
        call(0, "c1", name="a", arguments=""),
        call(0, arguments='{"x":'),
        call(0, arguments="1}"),
        call(1, "c2", name="b", arguments="{}"),
    ) == [ToolCall(0, "c1", "a"), Arguments(0, '{"x":'), Arguments(0, "1}"), ToolCall(1, "c2", "b"), Arguments(1, "{}")]


def test_calls_without_index_or_id_are_told_apart_by_their_names() -> None:
    assert read(call(None, name="a", arguments="{}"), call(None, name="b"), call(None, arguments="{}")) == [
        ToolCall(0, "call_up-1_0", "a"),
        Arguments(0, "{}"),
        ToolCall(1, "call_up-1_1", "b"),
        Arguments(1, "{}"),
    ]


def test_arguments_that_are_an_object_become_json() -> None:
    assert read(call(0, "c", name="a", arguments={"x": [1]}))[1] == Arguments(0, '{"x":[1]}')


@pytest.mark.parametrize("key", ["stop_reason", "matched_stop"])
def test_the_matched_stop_string_is_kept(key: str) -> None:
    reader = ItemReader()
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", key: "END"}
    assert reader.read(delta(event({"choices": [choice]}))) == [Text("a")]
    assert reader.stop_reason == "END"


def test_other_choices_are_not_read() -> None:
    assert read(event({"choices": [{"index": 1, "delta": {"content": "no"}}]})) == []


@pytest.mark.parametrize(
    "bad",
    [
        b"data: {\n\n",
        b'data: {"choices":[{"delta":7}]}\n\n',
        event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]}),
    ],
)
def test_malformed_chunks_are_the_workers_failure(bad: bytes) -> None:
    with pytest.raises(WorkerLost):
        read(bad)


def test_events_like_one_before_give_their_text_undecoded() -> None:
    reader = ItemReader()
    assert reader.text(chunk("a")) is None  # nothing is known yet
    reader.read(delta(role() + chunk("a")))
    assert reader.text(chunk('b"\\\n') + chunk("ü")) == b'b\\"\\\\\\n\\u00fc'
    assert reader.text(chunk("b", "stop")) is None
    assert reader.text(chunk("b") + piece(reasoning="c")) is None
    assert reader.text(call(0, "c", name="a")) is None
    assert reader.reasoning(piece(reasoning="c")) is None
    reader.read(delta(piece(reasoning="c")))
    assert reader.reasoning(piece(reasoning="d") + piece(reasoning="e")) == b"de"


def test_an_event_with_a_further_field_is_not_plain() -> None:
    reader = ItemReader()
    reader.read(delta(piece(content="a")))
    assert reader.text(piece(content="b")) == b"b"
    assert reader.text(piece(content="b", refusal="c")) is None


def test_arguments_of_the_last_call_only_are_given_undecoded() -> None:
    reader = ItemReader()
    reader.read(delta(call(0, "c", name="a", arguments="") + call(0, arguments='{"x":')))
    assert reader.arguments(call(0, arguments=' "y') + call(0, arguments='"}')) == b' \\"y\\"}'
    assert reader.arguments(call(1, arguments="1")) is None
    reader.read(delta(call(1, "d", name="b", arguments="")))
    assert reader.arguments(call(0, arguments="1")) is None
    reader.read(delta(call(0, arguments="1")))
    assert reader.arguments(call(0, arguments="1")) is None
    reader.read(delta(call(1, arguments="{")))
    assert reader.arguments(call(1, arguments="}")) == b"}"


@given(st.lists(st.text(min_size=1), min_size=1), st.sampled_from(["text", "reasoning", "arguments"]))
def test_undecoded_text_is_what_decoding_gives(texts: list[str], kind: str) -> None:
    writers: dict[str, Any] = {
        "text": chunk,
        "reasoning": lambda text: piece(reasoning=text),
        "arguments": lambda text: call(0, arguments=text),
    }
    write = writers[kind]
    reader = ItemReader()
    reader.read(delta(call(0, "c", name="f", arguments="") + write("first")))
    found = getattr(reader, kind)(b"".join(map(write, texts)))
    assert found is not None
    assert msgspec.json.decode(b'"' + found + b'"') == "".join(texts)


PIECES = st.one_of(
    st.builds(chunk, st.text(max_size=5)),
    st.builds(lambda text: piece(reasoning=text), st.text(min_size=1, max_size=5)),
    st.builds(lambda text: piece(content=text, token_ids=None), st.text(max_size=5)),
    st.builds(lambda text: call(3, "c", name="f", arguments=text), st.text(max_size=5)),
)


@given(st.lists(PIECES, max_size=12), st.data())
def test_any_grouping_of_the_events_gives_the_same_items(events: list[bytes], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=4)))
    groups = [b"".join(events[start:end]) for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    assert read(*groups) == read(*events)


def test_a_whole_answer_gives_the_items_of_its_stream() -> None:
    events = [
        role(),
        piece(reasoning="so"),
        chunk("Hi "),
        chunk("you"),
        call(0, "c1", name="a", arguments="{"),
        call(0, arguments="}"),
        call(1, "c2", name="b", arguments="{}"),
        piece("tool_calls"),
    ]
    answer = read_answer(collect_events(b"".join(events), b""))
    assert answer.items == merged(read(*events))
    assert (answer.finish, answer.stop_reason) == ("tool_calls", None)
    assert read_answer(msgspec.json.encode(collect_events(b"".join(events), b""))).items == answer.items


@pytest.mark.parametrize("bad", [b"{", b"{}", b'{"choices":[]}', b'{"choices":[{"text":"a"}]}'])
def test_a_malformed_answer_is_the_workers_failure(bad: bytes) -> None:
    with pytest.raises(WorkerLost):
        read_answer(bad)
