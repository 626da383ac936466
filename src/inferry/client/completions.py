"""Calls and their results: request bodies, answers and events of streams. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from inferry.client.errors import CallError, ConnectionFailed, error_of

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text or token ids for `/v1/completions`, or messages for `/v1/chat/completions`."""


class Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class Completion(Struct, frozen=True, kw_only=True):
    """An answer. `finish` says why it ended; `tool_calls` are as in OpenAI's API.

    `step`, `request_id`, `lane`, `queue_ms` and `worker` are what the gateway says of the call; None where it says
    nothing, as in streams whose headers were sent before the call left the queue.
    """

    text: str
    finish: str
    usage: Usage
    model: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    step: str | None = None
    request_id: str | None = None
    lane: str | None = None
    queue_ms: float | None = None
    worker: str | None = None


Result = Completion | CallError


class Piece(Struct, frozen=True):
    """The next part of a streamed answer. `tool_calls` are the raw pieces of OpenAI's API."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


class Call(Struct, frozen=True):
    """A request of the gateway."""

    path: str
    body: bytes
    headers: dict[str, str]
    step: str | None


def call_of(prompt: Prompt, fields: Mapping[str, Any], headers: Mapping[str, str], step: str | None) -> Call:
    """`fields` are those of OpenAI's API."""
    body: dict[str, Any] = {**fields}
    is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
    body["messages" if is_chat else "prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return Call(path, msgspec.json.encode(body), {"content-type": "application/json", **headers}, step)


def is_text(prompt: Prompt) -> bool:
    """Whether the prompt is for `/v1/completions`, which takes several in one call."""
    return isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)


def group_call(
    prompts: Sequence[Prompt], fields: Mapping[str, Any], headers: Mapping[str, str], step: str | None
) -> Call:
    """One call with several texts, or several lists of token ids."""
    body = {**fields, "prompt": [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]}
    headers = {"content-type": "application/json", **headers}
    return Call("/v1/completions", msgspec.json.encode(body), headers, step)


def group_of(body: bytes, headers: Mapping[str, str], step: str | None, count: int) -> list[Completion]:
    """The answers of a call with `count` prompts. The first has the usage of all."""
    answer = decoded(body)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not choices or sorted(one.get("index", 0) for one in choices) != list(range(count)):
        raise ConnectionFailed("the answer does not have one choice for each prompt")
    found: list[Completion] = []
    for choice in sorted(choices, key=lambda one: one["index"]):
        builder = CompletionBuilder()
        builder.model = answer.get("model") or ""
        builder.usage = Usage() if found else _usage(answer.get("usage"))
        builder.add_choice(choice)
        found.append(builder.completion(headers, step))
    return found


def completion_of(body: bytes, headers: Mapping[str, str], step: str | None) -> Completion:
    answer = decoded(body)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not choices:
        raise ConnectionFailed("the answer is not a completion", request_id=headers.get("x-request-id"))
    builder = CompletionBuilder()
    builder.model = answer.get("model") or ""
    builder.usage = _usage(answer.get("usage"))
    builder.add_choice(choices[0])
    return builder.completion(headers, step)


def decoded(body: bytes) -> Any:
    """The body as JSON; None where it is none."""
    try:
        return msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return None


class EventSplitter:
    """Splits a stream of bytes into the data of server-sent events. Comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        found = (
            b"".join([line[5:].strip() for line in event.split(b"\n") if line[:5] == b"data:"]) for event in events
        )
        return [one for one in found if one]


class CompletionBuilder:
    """Joins the events of a stream. `is_complete` is set by `[DONE]`: a stream without it was cut."""

    def __init__(self) -> None:
        self.model = ""
        self.usage = Usage()
        self.is_complete = False
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish = ""

    def add(self, data: bytes, headers: Mapping[str, str]) -> Piece | None:
        """The piece of an event; None for an event without output. Raises the error that an event reports."""
        if data == b"[DONE]":
            self.is_complete = True
            return None
        event = decoded(data)
        if not isinstance(event, dict) or "error" in event:
            raise error_of(None, headers, event)
        self.model = event.get("model") or self.model
        if event.get("usage"):
            self.usage = _usage(event["usage"])
        choices = event.get("choices")
        return self.add_choice(choices[0]) if choices else None

    def add_choice(self, choice: dict[str, Any]) -> Piece | None:
        message = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or message.get("content") or ""
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        calls = tuple(message.get("tool_calls") or ())
        self._texts.append(text)
        self._reasoning.append(reasoning)
        for number, call in enumerate(calls):
            self._add_call(call.get("index", number), call)
        self._finish = choice.get("finish_reason") or self._finish
        return Piece(text, reasoning, calls) if text or reasoning or calls else None

    def completion(self, headers: Mapping[str, str], step: str | None) -> Completion:
        queue_ms = headers.get("x-inferry-queue-ms")
        return Completion(
            text="".join(self._texts),
            finish=self._finish,
            usage=self.usage,
            model=self.model,
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls[index] for index in sorted(self._calls)),
            step=step,
            request_id=headers.get("x-request-id"),
            lane=headers.get("x-inferry-lane"),
            queue_ms=None if queue_ms is None else float(queue_ms),
            worker=headers.get("x-inferry-worker"),
        )

    def _add_call(self, index: int, piece: dict[str, Any]) -> None:
        function = piece.get("function") or {}
        call = self._calls.get(index)
        if call is None:
            start = {"name": function.get("name"), "arguments": function.get("arguments") or ""}
            self._calls[index] = {"id": piece.get("id"), "type": "function", "function": start}
        else:
            call["function"]["arguments"] += function.get("arguments") or ""


def _usage(raw: Any) -> Usage:
    if not isinstance(raw, dict):
        return Usage()
    details = raw.get("prompt_tokens_details") or {}
    return Usage(raw.get("prompt_tokens") or 0, raw.get("completion_tokens") or 0, details.get("cached_tokens") or 0)
