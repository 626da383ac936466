"""Responses written from chat completions: whole, and as events."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.errors import GatewayError, InvalidRequest, RateLimited, RunBudgetExhausted, WorkerLost
from inferry.domain.streams import Delta, Done, FinishReason, Usage
from inferry.ingress.openai.collect import collect_events
from inferry.ingress.responses.endpoint import ResponsesEndpoint
from inferry.ingress.wire_format import ClientRequest, EventWriter, WireFormat
from support.builders import a_job
from support.chat_script import piece, tool_call
from support.codex_request import AGENTS
from support.upstream import chunk, role, usage

JOB = a_job("j-1", tokens=50, cached=20)
PATCH = {"type": "custom", "name": "apply_patch"}
SEALED = ["reasoning.encrypted_content"]
TEXT_FIELDS = ("text", "refusal", "arguments", "input")


def wire_format(**fields: Any) -> WireFormat:
    body = msgspec.json.encode({"model": "m", "input": "Hi", **fields})
    found = ResponsesEndpoint(lambda: 9.5).decode(body)
    assert isinstance(found, ClientRequest)
    return found.format


def writer_of(format: WireFormat) -> EventWriter:
    found = format.writer(JOB, 1.0)
    assert found is not None
    return found


def delta(raw: bytes = b"", text: str = "") -> Delta:
    return Delta("j-1", "run", "j-1", 0, text, (), 1, raw)


def done(finish: FinishReason = FinishReason.STOP, **more: Any) -> Done:
    return Done("j-1", finish, Usage(60, 0, 7), **more)


def events_of(written: bytes) -> list[dict[str, Any]]:
    """Events, each under its own name, numbered without gaps."""
    *events, rest = written.split(b"\n\n")
    assert rest == b""
    found: list[dict[str, Any]] = []
    for one in events:
        name, _, data = one.partition(b"\n")
        found.append(msgspec.json.decode(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
        assert found[-1]["sequence_number"] == len(found) - 1
    return found


def streamed(*deltas: Delta, end: Done | None = None, **fields: Any) -> list[dict[str, Any]]:
    writer = writer_of(wire_format(**fields))
    return events_of(b"".join([*map(writer.piece, deltas), writer.last(end or done(), include_usage=False)]))


def whole(*events: bytes, **fields: Any) -> dict[str, Any]:
    body = wire_format(**fields).full_body(JOB, collect_events(b"".join(events), usage(60, 7)))
    found: dict[str, Any] = msgspec.json.decode(body)
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last response. Its items are those that were added, with the text of their deltas."""
    assert [one["type"] for one in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    text = ""
    for one in events[2:-1]:
        kind = one["type"].removeprefix("response.")
        assert one["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert one["item"]["status"] == "in_progress"
            items.append(one["item"])
            text = ""
            continue
        assert one.get("item_id", items[-1]["id"]) == items[-1]["id"]
        if kind.endswith(".delta"):
            text += one["delta"]
        elif kind == "content_part.added":
            assert not any(one["part"].get(name) for name in TEXT_FIELDS)
        elif kind == "content_part.done":
            assert text in [one["part"].get(name) for name in TEXT_FIELDS]
        elif kind.endswith(".done") and kind != "output_item.done":
            assert text in [one.get(name) for name in TEXT_FIELDS]
        elif kind == "output_item.done":
            assert one["item"]["id"] == items[-1]["id"]
            assert text == text_of(one["item"])
            items[-1] = one["item"]
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == items
    assert response["id"] == events[0]["response"]["id"]
    return response


def text_of(item: dict[str, Any]) -> str:
    for name in ("arguments", "input"):
        if name in item:
            return str(item[name])
    (part,) = item["content"]
    return str(part.get("text", part.get("refusal")))


def items_of(*events: bytes, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = accumulated(streamed(*map(delta, events), **fields))["output"]
    return found


def test_a_stream_of_text() -> None:
    events = streamed(delta(role()), delta(chunk("Hel")), delta(chunk("lo")), delta(piece("stop")))
    assert [one["type"] for one in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [one["delta"] for one in events[4:6]] == ["Hel", "lo"]
    response = accumulated(events)
    assert response["output"] == [
        {
            "id": "msg_j-1_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    assert (response["id"], response["object"], response["status"]) == ("resp_j-1", "response", "completed")
    assert (response["created_at"], response["completed_at"]) == (9, 9)
    assert response["usage"] == {
        "input_tokens": 60,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 67,
    }


def test_every_kind_of_item_has_its_own_events() -> None:
    events = streamed(
        delta(piece(reasoning="Hm.")),
        delta(chunk("Look.")),
        *map(delta, tool_call(0, "c-a", "weather", '{"city":', '"Bern"}')),
        *map(delta, tool_call(1, "c-b", "multi_agent_v1__spawn_agent", "{}")),
        *map(delta, tool_call(2, "c-c", "apply_patch", '{"inp', 'ut": "a\\nb"}')),
        delta(piece(refusal="No.")),
        tools=[AGENTS, PATCH],
        include=SEALED,
    )
    kinds = {one["type"].removeprefix("response.") for one in events}
    assert kinds >= {
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_text.delta",
        "output_text.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "refusal.delta",
        "refusal.done",
    }
    reasoning, message, weather, spawn, patch, refusal = accumulated(events)["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    assert reasoning["encrypted_content"].startswith("inferry:")
    assert message["content"][0]["text"] == "Look."
    assert weather | {"id": ""} == {
        "id": "",
        "type": "function_call",
        "status": "completed",
        "call_id": "c-a",
        "name": "weather",
        "arguments": '{"city":"Bern"}',
    }
    assert (spawn["namespace"], spawn["name"]) == ("multi_agent_v1", "spawn_agent")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "a\nb")
    assert refusal["content"] == [{"type": "refusal", "refusal": "No."}]
    ids = [one["id"] for one in (reasoning, message, weather, spawn, patch, refusal)]
    assert ids == ["rs_j-1_0", "msg_j-1_1", "fc_j-1_2", "fc_j-1_3", "ctc_j-1_4", "msg_j-1_5"]


def test_reasoning_is_sealed_only_where_it_was_asked_for() -> None:
    assert items_of(piece(reasoning="Hm."))[0]["encrypted_content"] is None


def test_input_of_a_custom_tool_in_another_shape_is_passed_on() -> None:
    for arguments in ("not json", "[1]", '{"patch":"x"}'):
        (item,) = items_of(*tool_call(0, "c", "apply_patch", arguments), tools=[PATCH])
        assert item["input"] == arguments


def test_text_of_an_embedded_engine_or_after_a_failover() -> None:
    response = accumulated(streamed(delta(chunk("a")), delta(text='"b"\n'), delta(text="c")))
    assert response["output"][0]["content"][0]["text"] == 'a"b"\nc'


def test_an_empty_answer_has_one_empty_message() -> None:
    assert text_of(accumulated(streamed())["output"][0]) == ""
    assert text_of(whole(role(), piece("stop"))["output"][0]) == ""


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(FinishReason.LENGTH, "max_output_tokens"), (FinishReason.CONTENT_FILTER, "content_filter")],
)
def test_a_response_that_was_cut_off_is_incomplete(finish: FinishReason, reason: str) -> None:
    response = accumulated(streamed(delta(piece(reasoning="Hm.")), delta(chunk("a")), end=done(finish)))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert whole(piece(reasoning="Hm."), chunk("a"), piece(finish.value)) == response


def test_an_exhausted_budget_is_named() -> None:
    end = done(FinishReason.LENGTH, stopped=RunBudgetExhausted("spent"))
    *_, last = streamed(delta(chunk("a")), end=end)
    assert last["inferry"] == {"code": "run_budget_exhausted", "message": "spent"}


def test_reasoning_tokens_are_reported_where_the_engine_does() -> None:
    counted = b'data: {"choices":[],"usage":{"completion_tokens_details":{"reasoning_tokens":3}}}\n\n'
    *_, last = streamed(delta(chunk("a")), end=done(raw=counted))
    assert last["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_mixed_arguments_of_several_calls_are_the_workers_failure() -> None:
    late = piece(tool_calls=[{"index": 0, "function": {"arguments": "}"}}])
    with pytest.raises(WorkerLost, match="mixed"):
        streamed(*map(delta, tool_call(0, "a", "f", "{")), *map(delta, tool_call(1, "b", "f", "{}")), delta(late))


def test_the_request_is_repeated_in_the_response() -> None:
    tools = [AGENTS, {"type": "web_search"}]
    wanted = {"type": "json_schema", "name": "t", "schema": {"type": "object"}, "strict": True}
    response = whole(
        chunk("a"),
        piece("stop"),
        instructions="Be brief.",
        tools=tools,
        text={"format": wanted},
        temperature=0.5,
        metadata={"a": "b"},
        reasoning={"effort": "high"},
        parallel_tool_calls=False,
    )
    assert response["tools"] == [AGENTS]
    assert response["text"] == {"format": wanted}
    assert (response["instructions"], response["temperature"], response["top_p"]) == ("Be brief.", 0.5, 1.0)
    assert (response["metadata"], response["parallel_tool_calls"]) == ({"a": "b"}, False)
    assert (response["reasoning"], response["tool_choice"]) == ({"effort": "high", "summary": None}, "auto")
    assert (response["store"], response["background"], response["service_tier"]) == (False, False, "default")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerLost("gone"), "server_error"),
        (InvalidRequest("bad"), "invalid_prompt"),
        (RunBudgetExhausted("spent"), "insufficient_quota"),
        (RateLimited("slow down.", retry_after_s=1.5), "rate_limit_exceeded"),
    ],
)
def test_an_error_ends_the_stream_as_failed(error: GatewayError, code: str) -> None:
    format = wire_format()
    writer = writer_of(format)
    events = events_of(writer.piece(delta(chunk("a"))) + format.error_event(error))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    if code == "rate_limit_exceeded":  # Codex reads the seconds in the text
        assert response["error"]["message"] == "slow down. Please try again in 1.5s."


def test_heartbeats_are_events() -> None:
    format = wire_format()
    writer = writer_of(format)
    written = format.heartbeat() + format.heartbeat() + writer.piece(delta(chunk("a")))
    kinds = [one["type"] for one in events_of(written)]
    assert kinds[:4] == ["response.created", "response.in_progress", "keepalive", "response.output_item.added"]


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
ANSWERS = st.builds(
    lambda reasoning, texts, calls: [
        role(),
        *[piece(reasoning=one) for one in reasoning],
        *[chunk(one) for one in texts],
        *[
            one
            for index, (name, pieces) in enumerate(calls)
            for one in tool_call(
                index,
                f"c{index}",
                name,
                '{"input":"',
                *[msgspec.json.encode(inner).decode()[1:-1] for inner in pieces],
                '"}',
            )
        ],
        piece("tool_calls" if calls else "stop"),
    ],
    st.lists(TEXTS, max_size=4),
    st.lists(TEXTS, max_size=6),
    st.lists(
        st.tuples(st.sampled_from(["f", "apply_patch", "multi_agent_v1__spawn_agent"]), st.lists(TEXTS, max_size=3)),
        max_size=3,
    ),
)


@given(ANSWERS, st.data())
def test_any_grouping_of_a_stream_gives_the_whole_response(events: list[bytes], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=6)))
    groups = [b"".join(events[start:end]) for start, end in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    fields: dict[str, Any] = {"tools": [AGENTS, PATCH], "include": SEALED}
    found = accumulated(streamed(*map(delta, groups), **fields))
    assert found == whole(*events, **fields)
