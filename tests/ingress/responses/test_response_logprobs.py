"""Log probabilities of responses: in deltas and parts, of the text alone."""

from typing import Any

import pytest

from inferry.domain.errors import WorkerLost
from support.chat_script import piece, tool_call
from support.upstream import event, role
from support.written_responses import accumulated, delta, items_of, streamed, text_of, whole

LOGPROBS = ["message.output_text.logprobs"]


def token(text: str, *likely: str, value: float = -0.5) -> dict[str, Any]:
    top = [{"token": one, "logprob": -1.0, "bytes": list(one.encode())} for one in likely]
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": top}


def without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    top = [{"token": one["token"], "logprob": one["logprob"]} for one in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}


def logged(*entries: dict[str, Any], **fields: Any) -> bytes:
    """One chunk with these entries."""
    choice = {"index": 0, "delta": fields, "logprobs": {"content": entries}, "finish_reason": None}
    return event({"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def test_log_probabilities_are_in_deltas_and_parts() -> None:
    first, held, last, end = token("Hel", "Hel", "Hi"), token("l"), token("o"), token("<end>")
    chunks = [role(), logged(first, content="Hel"), logged(held, content=""), logged(last, content="lo"), logged(end)]
    events = streamed(*map(delta, chunks), include=LOGPROBS, top_logprobs=2)
    found = [one["logprobs"] for one in events if one["type"] == "response.output_text.delta"]
    assert found == [[without_bytes(first)], [without_bytes(held), without_bytes(last)]]
    (done_event,) = [one for one in events if one["type"] == "response.output_text.done"]
    assert done_event["logprobs"] == [without_bytes(one) for one in (first, held, last)]
    response = accumulated(events)
    (part,) = response["output"][0]["content"]
    assert part["logprobs"] == [first, held, last]
    assert response["top_logprobs"] == 2
    assert whole(*chunks, piece("stop"), include=LOGPROBS, top_logprobs=2)["output"] == response["output"]


def test_log_probabilities_are_those_of_the_text_alone() -> None:
    thought, text, call = token("Hm."), token("Look."), token("weather")
    (head, *arguments) = tool_call(0, "c-a", "weather", "{}")
    events = (logged(thought, reasoning="Hm."), logged(token("</think>")), logged(text, content="Look."), head)
    more = (*arguments, logged(call))
    streamed_items = items_of(*events, *more, include=LOGPROBS)
    whole_items = whole(*events, *more, piece("tool_calls"), include=LOGPROBS)["output"]
    assert [one["type"] for one in streamed_items] == ["reasoning", "message", "function_call"]
    assert streamed_items[1]["content"][0]["logprobs"] == [text]
    assert whole_items == streamed_items


def test_an_answer_without_text_has_no_entries() -> None:
    (item,) = items_of(role(), logged(token("<end>")), include=LOGPROBS)
    assert (item["content"][0]["text"], item["content"][0]["logprobs"]) == ("", [])


def test_tokens_that_do_not_spell_the_text_keep_their_entries() -> None:
    parts = [token("\ufffd"), token("\ufffd")]
    empty = [token(""), token("é"), token("t")]
    for entries, text in ((parts, "é"), (empty, "ét")):
        (item,) = items_of(*[logged(one) for one in entries[:-1]], logged(entries[-1], content=text), include=LOGPROBS)
        assert item["content"][0]["logprobs"] == entries


def test_bytes_that_a_server_leaves_out_are_those_of_the_token() -> None:
    bare = {"token": "é", "logprob": -0.5}
    (item,) = items_of(logged(bare, content="é"), include=LOGPROBS)
    assert item["content"][0]["logprobs"] == [{**bare, "bytes": [195, 169], "top_logprobs": []}]


def test_log_probabilities_that_were_not_asked_for_are_left_out() -> None:
    response = accumulated(streamed(delta(logged(token("a"), content="a")), delta(logged(content="b"))))
    assert response["output"][0]["content"][0]["logprobs"] == []
    odd = event({"id": "up-1", "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": 7}}]})
    assert text_of(items_of(odd)[0]) == "a"
    with pytest.raises(WorkerLost, match="log probabilities"):
        streamed(delta(odd), include=LOGPROBS)
