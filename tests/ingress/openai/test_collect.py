"""Events folded into the body that the engine would have sent."""

import time
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.cli.checkout import is_compiled
from inferry.domain.errors import WorkerLost
from inferry.ingress.openai.collect import _TEXT_ONLY_EVENT, collect_events, join_texts_in_python
from support.upstream import chunk, event, role, usage


def collected(*events: bytes, usage_event: bytes = b"") -> dict[str, Any]:
    return collect_events(b"".join(events), usage_event)


def test_texts_are_joined_and_usage_is_kept() -> None:
    answer = collected(role(), chunk("Hel"), chunk("lo", "stop"), usage_event=usage(9, 2))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == 11


def test_completions_keep_their_shape() -> None:
    answer = collected(chunk("a", chat=False), chunk("b", "length", chat=False))
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "ab"


def test_tool_calls_are_put_together() -> None:
    def call(**piece: Any) -> bytes:
        return event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **piece}]}}]})

    answer = collected(
        call(id="c1", type="function", function={"name": "weather"}),
        call(function={"arguments": '{"city":'}),
        call(function={"arguments": '"Bern"}'}),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}),
    )
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city":"Bern"}'}
    assert made["id"] == "c1"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_an_answer_that_ends_while_it_reasons_has_no_content(field: str) -> None:
    answer = collected(role(), event({"choices": [{"index": 0, "delta": {field: "I see"}, "finish_reason": "length"}]}))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": None, field: "I see"}


def test_several_choices_stay_apart() -> None:
    def piece(index: int, text: str) -> bytes:
        return event({"choices": [{"index": index, "delta": {"content": text}}]})

    answer = collected(piece(1, "b"), piece(0, "a"), piece(1, "B"), piece(0, "A"))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["aA", "bB"]


@pytest.mark.parametrize("garbage", [[{"finish_reason": None}], {"choices": ["x"]}, {"choices": [{"text": 7}]}, 3])
def test_events_without_a_valid_answer_are_worker_lost(garbage: Any) -> None:
    with pytest.raises(WorkerLost):
        collect_events(chunk("a", chat=False) + event(garbage), b"")


def test_the_cost_of_joining_is_linear_in_the_length() -> None:
    """Sixteen times the events cost about sixteen times the work, where doing it over and over would cost 256 times.

    Work is the processor time of this thread alone, the least of several tries: what else the machine does is no part
    of it.
    """

    def seconds(count: int) -> float:
        events = chunk("word ") * count
        tries = []
        for _ in range(7):
            begin = time.thread_time()
            collect_events(events, b"")
            tries.append(time.thread_time() - begin)
        return min(tries)

    assert seconds(32_000) < 80 * max(seconds(2_000), 1e-4)


# -- joined as bytes, or event by event: the same answer -------------------------------------------------------------

TEXTS = st.lists(
    st.text(max_size=6) | st.sampled_from(['"', "\\", '\\"', '"},"finish_reason":null}]}', "\n\n"]), max_size=12
)


def a_text(text: str, index: int = 0, **more: Any) -> bytes:
    return event({"id": "1", "choices": [{"index": index, "delta": {"content": text, **more}, "finish_reason": None}]})


@given(st.lists(st.tuples(TEXTS, st.integers(0, 1), st.booleans()), max_size=4), st.booleans())
def test_however_events_follow_each_other_texts_are_whole(
    runs: list[tuple[list[str], int, bool]], opens_with_role: bool
) -> None:
    events = [role()] if opens_with_role else []
    said: dict[int, str] = {0: ""} if opens_with_role else {}
    thought: dict[int, str] = {}
    for texts, index, thinks in runs:
        for text in texts:
            events.append(a_text(text, index, **({"reasoning": text} if thinks else {})))
            said[index] = said.get(index, "") + text
            if thinks:
                thought[index] = thought.get(index, "") + text
    answer = collected(*events)
    messages = {choice["index"]: choice["message"] for choice in answer["choices"]}
    assert {index: message["content"] for index, message in messages.items()} == said
    assert {index: message["reasoning"] for index, message in messages.items() if "reasoning" in message} == thought


def test_characters_split_between_events_are_one_again() -> None:
    halves = [
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ude00"},"finish_reason":null}]}\n\n',
    ]
    assert collected(*halves)["choices"][0]["message"]["content"] == "\U0001f600"


# -- the same in C ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not is_compiled(), reason="nothing is compiled here")
@given(TEXTS, st.sampled_from([b"", chunk("end", "stop"), event({"choices": []}), b": comment\n\n", b"data: {"]))
def test_texts_are_joined_in_c_as_they_are_in_python(texts: list[str], behind: bytes) -> None:
    join_texts = import_module("inferry.ingress.openai._text_join").join_texts
    raw = b"".join(map(a_text, ["first", *texts])) + behind
    first = _TEXT_ONLY_EVENT.match(raw)
    assert first is not None
    joined = join_texts(raw, 0, first.end("before"), first.start("after"), first.end("after"))
    assert joined == join_texts_in_python(raw, 0, first)
    assert joined.count(b"data: ") - behind.count(b"data: ") == 1


@pytest.mark.skipif(not is_compiled(), reason="nothing is compiled here")
def test_texts_are_joined_wherever_the_bytes_end() -> None:
    join_texts = import_module("inferry.ingress.openai._text_join").join_texts
    raw = b"".join(map(a_text, ["first", 'a "quote"', "a \\ slash", "a\nline"]))
    first = _TEXT_ONLY_EVENT.match(raw)
    assert first is not None
    places = first.end("before"), first.start("after"), first.end("after")
    for size in range(places[-1], len(raw) + 1):
        joined = join_texts(raw[:size], 0, *places)
        assert joined.startswith(raw[: places[1]])
        assert len(joined) <= size
    for wrong in [(-1, *places), (0, places[1], places[0], places[2]), (0, *places[:2], len(raw) + 1)]:
        with pytest.raises(ValueError):
            join_texts(raw, *wrong)
