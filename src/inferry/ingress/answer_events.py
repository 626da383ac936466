"""The events of a streamed answer, written from a whole chat or completions answer."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.encode
_OBJECTS: Final = {"chat.completion": "chat.completion.chunk"}


def answer_events(body: Mapping[str, Any]) -> bytes:
    """Two events for each choice: the whole message or text, and the finish reason."""
    head = _head(body)
    events: list[bytes] = []
    for choice in body["choices"]:
        index, logprobs = choice.get("index", 0), choice.get("logprobs")
        if "message" in choice:
            piece: dict[str, Any] = {"delta": _delta(choice["message"])}
            last: dict[str, Any] = {"delta": {}}
        else:
            piece, last = {"text": choice.get("text") or ""}, {"text": ""}
        first = {"index": index, **piece, "logprobs": logprobs, "finish_reason": None}
        final = {"index": index, **last, "logprobs": None, "finish_reason": choice.get("finish_reason")}
        if choice.get("stop_reason") is not None:
            final["stop_reason"] = choice["stop_reason"]
        events += [_event(head | {"choices": [first]}), _event(head | {"choices": [final]})]
    return b"".join(events)


def usage_event(body: Mapping[str, Any]) -> bytes:
    return _event(_head(body) | {"choices": [], "usage": body.get("usage")})


def _head(body: Mapping[str, Any]) -> dict[str, Any]:
    head = {key: value for key, value in body.items() if key not in ("choices", "usage")}
    return head | {"object": _OBJECTS.get(body.get("object", ""), body.get("object"))}


def _delta(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as one delta: tool calls are numbered in streams."""
    calls = message.get("tool_calls")
    return dict(message) | (
        {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]} if calls else {}
    )


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
