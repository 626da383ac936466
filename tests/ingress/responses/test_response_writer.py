"""Responses written from chat completions: whole, and as events."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.errors import GatewayError, InvalidRequest, RateLimited, RunBudgetExhausted, WorkerLost
from inferry.domain.streams import FinishReason
from support.chat_script import piece, tool_call
from support.codex_request import AGENTS
from support.upstream import chunk, role
from support.written_responses import (
    accumulated,
    delta,
    done,
    events_of,
    items_of,
    streamed,
    text_of,
    whole,
    wire_format,
    writer_of,
)

PATCH = {"type": "custom", "name": "apply_patch"}
SEALED = ["reasoning.encrypted_content"]


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
