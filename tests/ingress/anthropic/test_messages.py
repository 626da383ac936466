"""Messages written from chat completions: whole, and as events."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    Draining,
    GatewayError,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    QueueFull,
    RateLimited,
    RunBudgetExhausted,
    RunCancelled,
    WorkerLost,
    WorkerTimeout,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.streams import Delta, Done, FinishReason, Usage
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.anthropic.writer import MessageWriter
from inferry.ingress.openai.collect import collect_events
from support.builders import a_job
from support.upstream import chunk, event, role, usage

FORMAT = MessagesFormat()


def job(**more: Any) -> InferenceJob:
    return a_job("j-1", tokens=50, cached=20, **more)


def delta(raw: bytes = b"", text: str = "") -> Delta:
    return Delta("j-1", "run", "j-1", 0, text, (), 1, raw)


def piece(finish: str | None = None, *, stop: str | int | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": fields, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
    return event({"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def call(index: int, id: str | None = None, **function: str) -> bytes:
    head = {} if id is None else {"id": id, "type": "function"}
    return piece(tool_calls=[{"index": index, **head, "function": function}])


def done(finish: FinishReason = FinishReason.STOP, **more: Any) -> Done:
    return Done("j-1", finish, Usage(60, 40, 7), **more)


def streamed(*deltas: Delta, end: Done | None = None) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    writer = MessageWriter(job())
    written = b"".join([*map(writer.piece, deltas), writer.last(end or done(), include_usage=False)])
    *events, rest = written.split(b"\n\n")
    assert rest == b""
    found: list[dict[str, Any]] = []
    for one in events:
        name, _, data = one.partition(b"\n")
        found.append(msgspec.json.decode(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events. Blocks begin and end in order."""
    message: dict[str, Any] = events[0]["message"]
    content: list[dict[str, Any]] = []
    arguments = ""
    for one in events[1:]:
        match one["type"]:
            case "content_block_start":
                assert one["index"] == len(content)
                content.append(dict(one["content_block"]))
                arguments = ""
            case "content_block_delta":
                assert one["index"] == len(content) - 1
                name, text = next((name, text) for name, text in one["delta"].items() if name != "type")
                if name == "partial_json":
                    arguments += text
                else:
                    content[-1][name] += text
            case "content_block_stop":
                assert one["index"] == len(content) - 1
                if arguments:
                    content[-1]["input"] = msgspec.json.decode(arguments)
            case "message_delta":
                message |= {"content": content, **one["delta"], "usage": one["usage"]}
    assert events[-1] == {"type": "message_stop"}
    return message


def blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = accumulated(events)["content"]
    return found


def test_a_stream_of_text() -> None:
    events = streamed(delta(role()), delta(chunk("Hel")), delta(chunk("lo")), delta(piece("stop")))
    assert [one["type"] for one in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["id"], start["model"], start["content"], start["stop_reason"]) == ("msg_j-1", "m", [], None)
    assert start["usage"] == {
        "input_tokens": 50,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
        "service_tier": "standard",
    }
    assert events[2] == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Hel"},
    }
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["input_tokens"] == 20
    assert events[-2]["usage"]["cache_read_input_tokens"] == 40
    assert events[-2]["usage"]["output_tokens"] == 7


def test_every_kind_of_block_has_its_own_events() -> None:
    events = streamed(
        delta(piece(reasoning="So")),
        delta(piece(reasoning=".")),
        delta(chunk("Hi")),
        delta(call(0, "c1", name="look", arguments="")),
        delta(call(0, arguments='{"a":')),
        delta(call(0, arguments="1}")),
        delta(call(1, "c2", name="see", arguments="{}")),
        delta(piece("tool_calls")),
        end=done(FinishReason.TOOL_CALLS),
    )
    assert blocks(events) == [
        {"type": "thinking", "thinking": "So.", "signature": "j-1"},
        {"type": "text", "text": "Hi"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "see", "input": {}},
    ]
    starts = [one["index"] for one in events if one["type"] == "content_block_start"]
    stops = [one["index"] for one in events if one["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]
    kinds = [one["delta"]["type"] for one in events if one["type"] == "content_block_delta"]
    assert kinds == [
        *("thinking_delta", "thinking_delta", "signature_delta", "text_delta"),
        *("input_json_delta", "input_json_delta", "input_json_delta"),
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_text_of_an_embedded_engine_or_after_a_failover() -> None:
    assert blocks(streamed(delta(text="Hel"), delta(text="lo"))) == [{"type": "text", "text": "Hello"}]
    assert blocks(streamed(delta(chunk("Hel")), delta(text="lo"))) == [{"type": "text", "text": "Hello"}]
    assert blocks(streamed(delta(chunk("H") + chunk("el"), "lo"))) == [{"type": "text", "text": "Hello"}]


def test_an_empty_answer_has_one_empty_block() -> None:
    assert blocks(streamed()) == [{"type": "text", "text": ""}]
    assert whole(role(), piece("stop"))["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    ("events", "finish", "expected"),
    [
        ([chunk("a", "stop")], FinishReason.STOP, ("end_turn", None)),
        ([chunk("a"), piece("stop", stop="END")], FinishReason.STOP, ("stop_sequence", "END")),
        ([chunk("a"), piece("stop", stop=128001)], FinishReason.STOP, ("end_turn", None)),
        ([chunk("a"), piece("length")], FinishReason.LENGTH, ("max_tokens", None)),
        ([chunk("a"), piece("content_filter")], FinishReason.CONTENT_FILTER, ("refusal", None)),
        ([call(0, "c", name="f"), piece("tool_calls")], FinishReason.TOOL_CALLS, ("tool_use", None)),
        ([call(0, "c", name="f"), piece("stop")], FinishReason.STOP, ("tool_use", None)),
    ],
)
def test_stop_reasons(events: list[bytes], finish: FinishReason, expected: tuple[str, str | None]) -> None:
    found = streamed(*map(delta, events), end=done(finish))[-2]["delta"]
    assert (found["stop_reason"], found["stop_sequence"]) == expected
    message = whole(*events)
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_a_resumed_job_reports_its_stop_string() -> None:
    events = streamed(delta(text="a"), end=done(stop_reason="END"))
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_an_exhausted_budget_is_named() -> None:
    stopped = RunBudgetExhausted("spent")
    event = streamed(delta(text="a"), end=done(FinishReason.LENGTH, stopped=stopped))[-2]
    assert event["delta"]["stop_reason"] == "max_tokens"
    assert event["inferry"] == {"code": "run_budget_exhausted", "message": "spent"}


def test_mixed_arguments_of_several_calls_are_the_workers_failure() -> None:
    with pytest.raises(WorkerLost):
        streamed(delta(call(0, "c1", name="a") + call(1, "c2", name="b") + call(0, arguments="{}")))


def whole(*events: bytes, lane: Lane = Lane.P1) -> dict[str, Any]:
    body = FORMAT.full_body(job(lane=lane), collect_events(b"".join(events), usage(60, 7)))
    found: dict[str, Any] = msgspec.json.decode(body)
    return found


def test_a_whole_message() -> None:
    assert whole(role(), chunk("Hi"), piece("stop"), lane=Lane.P0) == {
        "id": "msg_j-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 60,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
            "service_tier": "priority",
        },
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("null", {}),
        ('{"a":{}}', {"a": {}}),
        ('{"a":', {"INVALID_JSON": '{"a":'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ],
)
def test_arguments_become_an_object(arguments: str, expected: Any) -> None:
    message = whole(call(0, "c", name="f", arguments=arguments), piece("tool_calls"))
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": expected}]


TEXTS = st.text(min_size=1, max_size=6)
ANSWERS = st.builds(
    lambda reasoning, texts, calls: [
        role(),
        *[piece(reasoning=one) for one in reasoning],
        *[chunk(one) for one in texts],
        *[
            one
            for index, pieces in enumerate(calls)
            for one in (
                call(index, f"c{index}", name="f", arguments=""),
                call(index, arguments='{"x":"'),
                *[call(index, arguments=msgspec.json.encode(inner).decode()[1:-1]) for inner in pieces],
                call(index, arguments='"}'),
            )
        ],
        piece("tool_calls" if calls else "stop"),
    ],
    st.lists(TEXTS, max_size=4),
    st.lists(TEXTS, max_size=6),
    st.lists(st.lists(TEXTS, max_size=3), max_size=3),
)


@given(ANSWERS, st.data())
def test_any_grouping_of_a_stream_gives_the_whole_message(events: list[bytes], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=6)))
    groups = [b"".join(events[start:end]) for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    finish = FinishReason.TOOL_CALLS if b'"tool_calls"}' in events[-1] else FinishReason.STOP
    message = whole(*events)
    found = accumulated(streamed(*map(delta, groups), end=Done("j-1", finish, Usage(60, 0, 7))))
    assert found == message


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error"),
        (InvalidApiKey("x"), 401, "authentication_error"),
        (RunBudgetExhausted("x"), 402, "billing_error"),
        (ModelNotFound("x"), 404, "not_found_error"),
        (RunCancelled("x"), 409, "invalid_request_error"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (RateLimited("x"), 429, "rate_limit_error"),
        (QueueFull("x"), 529, "overloaded_error"),
        (NoWorker("x"), 529, "overloaded_error"),
        (Draining("x"), 529, "overloaded_error"),
        (WorkerLost("x"), 502, "api_error"),
        (WorkerTimeout("x"), 504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(error: GatewayError, status: int, kind: str) -> None:
    assert FORMAT.error_status(error) == status
    body = msgspec.json.decode(FORMAT.error_body(error, "req-1"))
    assert body == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "req-1"}
    event = FORMAT.error_event(error)
    assert event.startswith(b"event: error\ndata: ")
    assert msgspec.json.decode(event[19:])["error"]["type"] == kind


def test_a_long_prompt_is_refused_in_the_words_that_clients_look_for() -> None:
    def message(error: GatewayError) -> str:
        text: str = msgspec.json.decode(FORMAT.error_body(error, "r"))["error"]["message"]
        return text

    error = ContextLengthExceeded("the worker's words")
    assert message(error) == "prompt is too long: the worker's words"
    assert message(error.with_tokens(210_000, None, 200_000)) == "prompt is too long: 210000 tokens > 200000 maximum"
    both = "input length and `max_tokens` exceed context limit: 188000 + 32000 > 200000"
    assert message(error.with_tokens(188_000, 32_000, 200_000)) == both
