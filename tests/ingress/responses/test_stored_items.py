"""Items of stored responses and of requests that are stored."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from inferry.domain.errors import InvalidRequest
from inferry.durable.responses import StoredResponse
from inferry.ingress.responses.stored_items import history_of, input_items


def stored(status: str = "completed") -> StoredResponse:
    response = msgspec.json.encode({"status": status, "output": [{"type": "message", "role": "assistant"}]})
    return StoredResponse(response=Raw(response), input=[Raw(b'{"type":"message","role":"user"}')])


def items(given: Any, found: dict[int, Raw] | None = None) -> list[Any]:
    raw = Raw(msgspec.json.encode(given))
    return [msgspec.json.decode(one) for one in input_items(raw, "resp_1", found or {})]


def test_a_conversation_is_inputs_and_outputs_in_order() -> None:
    assert [one.role for one in history_of([stored(), stored("failed")])] == ["user", "assistant"] * 2


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_a_response_that_has_not_ended_is_no_conversation(status: str) -> None:
    with pytest.raises(InvalidRequest, match="has not ended"):
        history_of([stored(), stored(status)])


def test_a_call_that_was_cut_off_is_no_part_of_the_conversation() -> None:
    calls = [
        {"type": "function_call", "status": status, "call_id": status, "name": "f", "arguments": '{"a'}
        for status in ("completed", "incomplete")
    ]
    cut_off = StoredResponse(
        response=Raw(msgspec.json.encode({"status": "incomplete", "output": calls})),
        input=[Raw(b'{"type":"message","role":"user"}')],
    )
    assert [one.call_id for one in history_of([cut_off, stored()])] == [None, "completed", None, None]


def test_stored_items_have_a_type_and_an_id() -> None:
    text = {"type": "input_text", "text": "b"}
    call = {"type": "function_call", "id": "fc_given", "call_id": "c", "name": "f", "arguments": "{}"}
    found = items(
        [{"role": "user", "content": 'a"'}, {"role": "user", "content": [text]}, call, {"id": "msg_0_0"}],
        {3: Raw(b'{"type":"message","id":"msg_0_0"}')},
    )
    assert found[0] == {
        "id": "msg_1_i0",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": 'a"'}],
    }
    assert found[1] == {"id": "msg_1_i1", "type": "message", "role": "user", "content": [text]}
    assert found[2:] == [call, {"type": "message", "id": "msg_0_0"}]
    assert items("hi")[0]["content"] == [{"type": "input_text", "text": "hi"}]
