"""Responses that the gateway writes from the chunks of a chat completion, whole and streamed."""

from typing import Any

import msgspec

from inferry.domain.streams import Delta, Done, FinishReason, Usage
from inferry.ingress.openai.collect import collect_events
from inferry.ingress.responses.endpoint import ResponsesEndpoint
from inferry.ingress.wire_format import ClientRequest, EventWriter, WireFormat
from support.builders import a_job
from support.upstream import usage

JOB = a_job("j-1", tokens=50, cached=20)
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
