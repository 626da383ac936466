"""Answers of `/v1/messages` and `/v1/responses`, whole and streamed, in a form in which a gateway's equal vLLM's own.

The official SDKs accept each of them.
"""

import http.client
import json
import typing
from collections.abc import Iterator
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent

from support.serving import post
from support.vllm_differences import MESSAGES, RESPONSES, without

HELLO = {"role": "user", "content": "hello there"}


def models_of(union: Any) -> dict[str, Any]:
    """The SDK's models of events, by their types."""
    models = typing.get_args(typing.get_args(union)[0])
    return {name: model for model in models for name in typing.get_args(model.model_fields["type"].annotation)}


MESSAGE_EVENTS = models_of(RawMessageStreamEvent)
RESPONSE_EVENTS = models_of(ResponseStreamEvent)


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    status, _, answer = post(url, path, body)
    assert status == 200, answer
    return answer


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    found = []
    for name, event in _named_events(url, path, body):
        assert name == event["type"]
        found.append(event)
    return found


def data_events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream without names."""
    return [event for _, event in _named_events(url, path, body)]


def _named_events(url: str, path: str, body: dict[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        body = {**body, "stream": True}
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
    finally:
        connection.close()
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines and lines["data"] != "[DONE]":
            yield lines.get("event"), json.loads(lines["data"])


def joined(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events with consecutive pieces of one text joined: where they are cut depends on when they were read."""
    found: list[dict[str, Any]] = []
    for event in stream:
        event = {key: value for key, value in event.items() if key != "sequence_number"}
        last = found[-1] if found else {}
        if not event["type"].endswith("delta") or event["type"] == "message_delta" or _kind(last) != _kind(event):
            found.append(event)
        elif isinstance(event["delta"], str):
            last["delta"] += event["delta"]
        else:
            for key, value in event["delta"].items():
                if key != "type":
                    last["delta"][key] += value
    return found


def _kind(event: dict[str, Any]) -> tuple[Any, Any]:
    delta = event.get("delta")
    return event.get("type"), delta.get("type") if isinstance(delta, dict) else None


# -- Messages ----------------------------------------------------------------------------------------------------------


def messages_body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 12, "temperature": 0, "messages": [HELLO], **fields}


def message(answer: dict[str, Any]) -> Any:
    """A message that Anthropic's SDK accepts, without what differs. The ids of tool calls are drawn."""
    Message.model_validate(answer)
    return without({"stop_sequence": None, **answer}, MESSAGES)


def message_events(stream: list[dict[str, Any]], *, is_complete: bool = True) -> Any:
    """Events that Anthropic's SDK accepts, without what differs. `is_complete`: blocks of thinking begin with all that
    the SDK wants, which vLLM's lack.
    """
    for event in stream:
        if not is_complete and event.get("content_block", {}).get("type") == "thinking":
            event["content_block"]["signature"] = ""
        MESSAGE_EVENTS[event["type"]].model_validate(event)
    found = without(joined(stream), MESSAGES)
    del found[0]["message"]["usage"]
    return found


# -- Responses ---------------------------------------------------------------------------------------------------------


def responses_body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_output_tokens": 12, "temperature": 0, "input": "hello there", **fields}


def response(answer: dict[str, Any]) -> Any:
    """A response that OpenAI's SDK accepts, without what differs."""
    Response.model_validate(answer)
    text = answer.pop("text")
    found = without(answer, RESPONSES)
    if text is not None and text["format"]["type"] != "text":
        found["format"] = without(text["format"], RESPONSES)
    if not found["tools"]:
        del found["tool_choice"]
    del found["created_at"]
    found["previous_response_id"] = found["previous_response_id"] is not None
    found["output"] = [item(one) for one in found["output"]]
    return found


def item(found: dict[str, Any]) -> dict[str, Any]:
    """An item without the ids that are drawn, its arguments parsed."""
    found = {key: value for key, value in found.items() if key not in ("id", "call_id", "status")}
    if found["type"] == "reasoning":
        found["content"] = found["content"] or []
    if found.get("arguments"):
        found["arguments"] = json.loads(found["arguments"])
    return found


def response_events(stream: list[dict[str, Any]]) -> Any:
    numbers = [event["sequence_number"] for event in stream]
    assert numbers == list(range(len(stream)))
    found = []
    for event in joined(stream):
        RESPONSE_EVENTS[event["type"]].model_validate({**event, "sequence_number": 0})
        if "response" in event:
            whole = response(event["response"])
            is_last = whole["status"] != "in_progress"
            event = {"type": "the last" if is_last else event["type"], "response": whole}
        elif event["type"] == "response.function_call_arguments.done":
            event.pop("name", None)
        elif "item" in event:
            event = without(event, RESPONSES) | {"item": item(without(event["item"], RESPONSES))}
        found.append(without(event, RESPONSES))
    return found
