"""Upstream events folded into one response body, for clients that do not stream.

Jobs are streamed upstream, because the scheduler needs the time of the first token. The client gets the body that the
engine would have sent: per choice the texts are joined, tool calls assembled, log probabilities concatenated, and the
last value of every other field is kept.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from inferry.domain.errors import WorkerLost
from inferry.domain.response_shapes import with_null_fields
from inferry.domain.streams import Done

_decode: Final = msgspec.json.decode
_encode: Final = msgspec.json.encode

# An event with one piece of text and no other field that has to be joined: names, numbers and nulls surround the text.
# Another event with the same bytes around its text differs in the text only.
_TEXT_ONLY_EVENT: Final = re.compile(
    rb"(?P<before>"
    rb'data: ?\{[^\[\]\n]*"choices":\[\{"index":\d+,(?:"[a-z_]+":null,)*'
    rb'(?:(?P<chat>"delta":\{"content":)|"text":)")'
    rb'[^"\\\n]*(?:\\.[^"\\\n]*)*'
    rb'(?P<after>"(?(chat)\})[^\[{\n"]*(?:"[a-z_]+":[^\[{\n"]*)*)(?=\n\n)'
)


def _load_c_function() -> Callable[[bytes, int, int, int, int], bytes] | None:
    try:
        from inferry.ingress.openai import _text_join
    except ImportError:
        return None
    return _text_join.join_texts


_join_texts: Final = _load_c_function()
_FULL_OBJECT_NAMES: Final = {"chat.completion.chunk": "chat.completion"}


def collect_events(raw: bytes, usage_event: bytes, shape: dict[str, Any] | None = None) -> dict[str, Any]:
    """One JSON body from complete server-sent events, with the fields of the server's own non-streaming body."""
    try:
        body = _collect(raw, usage_event)
        return body if shape is None else with_null_fields(body, shape)
    except (AttributeError, TypeError, KeyError, ValueError):
        raise WorkerLost("the worker sent malformed events") from None


def pass_through_body(body: bytes, end: Done) -> bytes:
    """A non-streaming body, with a corrected usage and the early stop added where there are any."""
    if not end.raw and end.stopped is None:
        return body
    decoded: dict[str, Any] = _decode(body)
    if end.raw:
        decoded["usage"] = _decode(end.raw[5:])["usage"]
    if end.stopped is not None:
        decoded["inferry"] = {"code": end.stopped.code, "message": end.stopped.message}
    return _encode(decoded)


def _collect(raw: bytes, usage_event: bytes) -> dict[str, Any]:
    body: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    previous: dict[str, Any] = {}
    for line in (_join_text_events(raw) + usage_event).split(b"\n"):
        if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
            continue
        try:
            event = _decode(line[5:])
        except msgspec.DecodeError:
            raise WorkerLost("the worker sent an event that is not JSON") from None
        for chunk in event.pop("choices", ()):
            index = chunk.get("index", 0)
            choice = choices.get(index)
            if choice is None:
                choice = choices[index] = {"index": index}
            _fold(choice, chunk)
        if event != previous:  # most events repeat the fields of the one before
            previous = event
            for key, value in event.items():
                if value is not None or key not in body:
                    body[key] = value
    body["object"] = _FULL_OBJECT_NAMES.get(body.get("object", ""), body.get("object"))
    body["choices"] = [_finish_choice(choices[index]) for index in sorted(choices)]
    return body


def _join_text_events(raw: bytes) -> bytes:
    """Join consecutive events that differ in their text only.

    The bytes between two such texts are always the same. Cutting them out takes a fraction of the time of decoding
    every event, and most events of a long response are of this kind.
    """
    at = 0
    for _ in range(2):  # the first event often has the role only
        found = _TEXT_ONLY_EVENT.match(raw, at)
        if found is not None:
            break
        at = raw.find(b"\n\n", at) + 2
    else:
        return raw
    if _join_texts is not None:
        return _join_texts(raw, at, found.end("before"), found.start("after"), found.end("after"))
    return join_texts_in_python(raw, at, found)


def join_texts_in_python(raw: bytes, at: int, found: re.Match[bytes]) -> bytes:
    """`_join_text_events` in Python, for the first such event at offset `at`. `_text_join.c` is the faster version."""
    texts = raw[at:].split(found["after"] + b"\n\n" + found["before"])
    last = texts.pop()
    joined = b"".join(texts)
    # An event of another kind shows as a newline, and an event with another field as a quote.
    if b"\n" in joined or joined.count(b'"', found.end("before") - at) != joined.count(b'\\"'):
        return raw
    return raw[:at] + joined + last


def _fold(choice: dict[str, Any], chunk: dict[str, Any]) -> None:
    for key, value in chunk.items():
        match key:
            case "index":
                pass
            case "delta":
                _fold_message(choice.setdefault("message", {}), value or {})
            case "text":
                # A list until the end: appending to a string would take quadratic time.
                choice.setdefault("text", []).append(value or "")
            case "logprobs" if value is not None:
                _extend_lists(choice, "logprobs", value)
            case "token_ids" if value is not None:
                if not isinstance(choice.get("token_ids"), list):
                    choice["token_ids"] = []
                choice["token_ids"].extend(value)
            case _ if value is not None or key not in choice:
                choice[key] = value


def _fold_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value or ():
                _fold_call(message.setdefault("tool_calls", {}), call)
        elif key == "role" or not isinstance(value, str):
            message.setdefault(key, value)
        else:  # content, reasoning, refusal: text in pieces
            if not isinstance(message.get(key), list):
                message[key] = []
            message[key].append(value)


def _fold_call(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    call = calls.setdefault(piece.get("index", 0), {})
    for key, value in piece.items():
        if key == "function":
            function = call.setdefault("function", {"name": [], "arguments": []})
            for name, text in (value or {}).items():
                function.setdefault(name, []).append(text or "")
        elif key != "index" and value is not None:
            call[key] = value


def _extend_lists(choice: dict[str, Any], key: str, value: dict[str, Any]) -> None:
    known = choice.get(key)
    if not isinstance(known, dict):
        choice[key] = value
        return
    for name, items in value.items():
        if isinstance(items, list) and isinstance(known.get(name), list):
            known[name].extend(items)
        elif known.get(name) is None:
            known[name] = items


def _finish_choice(choice: dict[str, Any]) -> dict[str, Any]:
    if "text" in choice:
        choice["text"] = "".join(choice["text"])
    message = choice.get("message")
    if message is not None:
        calls = message.get("tool_calls")
        for key, value in message.items():
            if key != "tool_calls" and isinstance(value, list):
                message[key] = "".join(value)
        if isinstance(calls, dict):
            for call in calls.values():
                call["function"] = {name: "".join(texts) for name, texts in call.get("function", {}).items()}
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        if isinstance(calls, dict) or message.get("reasoning") or message.get("reasoning_content"):
            message["content"] = message.get("content") or None  # streams begin with an empty content
        message.setdefault("role", "assistant")
        message.setdefault("content", None)
    choice.setdefault("finish_reason", None)
    return choice
