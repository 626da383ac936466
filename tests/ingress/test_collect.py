"""Events folded into the answer the engine would have given in one piece."""

import json
import time
from typing import Any

import pytest

from inferry.domain.errors import WorkerLost
from inferry.ingress.collect import collect_events
from support.upstream import chunk, event, role, usage


def collected(*events: bytes, usage_event: bytes = b"") -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(collect_events(b"".join(events), usage_event))
    return answer


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


def test_several_choices_stay_apart() -> None:
    def piece(index: int, text: str) -> bytes:
        return event({"choices": [{"index": index, "delta": {"content": text}}]})

    answer = collected(piece(1, "b"), piece(0, "a"), piece(1, "B"), piece(0, "A"))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["aA", "bB"]


@pytest.mark.parametrize("garbage", [[{"finish_reason": None}], {"choices": ["x"]}, {"choices": [{"text": 7}]}, 3])
def test_events_that_make_no_answer_are_the_workers_fault(garbage: Any) -> None:
    with pytest.raises(WorkerLost):
        collect_events(chunk("a", chat=False) + event(garbage), b"")


def test_long_answers_cost_what_they_are_long() -> None:
    def seconds(count: int) -> float:
        events = chunk("word ") * count
        begin = time.process_time()
        collect_events(events, b"")
        return time.process_time() - begin

    seconds(1000)
    assert seconds(32_000) < 40 * max(seconds(2_000), 1e-3)
