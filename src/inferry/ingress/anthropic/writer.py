"""The server-sent events of one message.

Events with text are written around the engine's own bytes where those hold nothing but text: this runs once per token.
"""

from typing import Any, Final

import msgspec

from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, Done
from inferry.ingress.anthropic.message import EMPTY_BLOCK, message_object, signature, stop_reason, usage_object
from inferry.ingress.chat_items import Arguments, Item, ItemReader, Reasoning, Refusal, Text, ToolCall
from inferry.ingress.openai.render import early_stop_object

_encode = msgspec.json.encode

# Final: mypyc compiles them in.
_NONE: Final = 0
_TEXT: Final = 1
_THINKING: Final = 2
_TOOL: Final = 3
_END: Final = b'"}}\n\n'


class MessageWriter:
    """At most one block is open at a time; it ends when another begins."""

    __slots__ = ("_before", "_call", "_index", "_job", "_kind", "_reader", "_started")

    def __init__(self, job: InferenceJob) -> None:
        self._job = job
        self._reader = ItemReader()
        self._started = False
        self._index = -1  # of the open or the last block
        self._kind = _NONE
        self._call = -1  # the tool call of the last block of that kind
        self._before = b""  # the beginning of an event with the next piece of the open block

    def piece(self, delta: Delta) -> bytes:
        if not delta.text:
            text: bytes | None = None
            if self._kind == _TEXT:
                text = self._reader.text(delta.raw)
            elif self._kind == _TOOL:
                text = self._reader.arguments(delta.raw)
            elif self._kind == _THINKING:
                text = self._reader.reasoning(delta.raw)
            if text is not None:
                return b"%b%b%b" % (self._before, text, _END)
        events = [] if self._started else [self._start()]
        for item in self._reader.read(delta):
            self._write(item, events)
        return b"".join(events)

    def last(self, done: Done, *, include_usage: bool) -> bytes:
        events = [] if self._started else [self._start()]
        if self._index < 0:
            self._open(_TEXT, EMPTY_BLOCK, events)
        self._close(events)
        stop = self._reader.stop_reason if done.stop_reason is None else done.stop_reason
        reason, sequence = stop_reason(done.finish.value, stop, self._call >= 0)
        usage = done.usage
        counts = usage_object(self._job, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        event: dict[str, Any] = {"type": "message_delta", "delta": delta, "usage": counts}
        if done.stopped is not None:
            event["inferry"] = early_stop_object(done.stopped)
        events += (_event(event), b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        return b"".join(events)

    def _start(self) -> bytes:
        """The first event. Its usage is an estimate, since engines report theirs at the end."""
        self._started = True
        # Claude Code replaces a count of this event only by one above 0, so an estimate of cached tokens would remain
        # beside the reported `input_tokens` where the engine had nothing cached.
        counts = usage_object(self._job, self._job.footprint.prompt.expected, 0, 0)
        return _event({"type": "message_start", "message": message_object(self._job, [], None, None, counts)})

    def _write(self, item: Item, events: list[bytes]) -> None:
        if isinstance(item, Text):
            self._write_text(item.text, events)
        elif isinstance(item, Arguments):
            if self._kind != _TOOL or item.index != self._call:
                raise WorkerLost("the worker mixed the arguments of several tool calls")
            self._append(item.text, events)
        elif isinstance(item, Reasoning):
            if self._kind != _THINKING:
                self._open(_THINKING, {"type": "thinking", "thinking": "", "signature": ""}, events)
            self._append(item.text, events)
        elif isinstance(item, ToolCall):
            self._call = item.index
            self._open(_TOOL, {"type": "tool_use", "id": item.id, "name": item.name, "input": {}}, events)
        elif isinstance(item, Refusal):
            self._write_text(item.text, events)

    def _write_text(self, text: str, events: list[bytes]) -> None:
        if self._kind != _TEXT:
            self._open(_TEXT, EMPTY_BLOCK, events)
        self._append(text, events)

    def _append(self, text: str, events: list[bytes]) -> None:
        events.append(self._before + _encode(text)[1:-1] + _END)

    def _open(self, kind: int, block: dict[str, Any], events: list[bytes]) -> None:
        self._close(events)
        self._kind = kind
        self._index += 1
        events.append(_event({"type": "content_block_start", "index": self._index, "content_block": block}))
        self._before = _delta_event(self._index, *_DELTAS[kind])

    def _close(self, events: list[bytes]) -> None:
        if self._kind == _NONE:
            return
        if self._kind == _THINKING:
            sign = _delta_event(self._index, b"signature_delta", b"signature")
            events.append(sign + signature(self._job).encode() + _END)
        events.append(_event({"type": "content_block_stop", "index": self._index}))
        self._kind = _NONE


_DELTAS = {
    _TEXT: (b"text_delta", b"text"),
    _THINKING: (b"thinking_delta", b"thinking"),
    _TOOL: (b"input_json_delta", b"partial_json"),
}


def _delta_event(index: int, kind: bytes, field: bytes) -> bytes:
    """An event up to the text of its field."""
    return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":"' % (
        index,
        kind,
        field,
    )


def _event(value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), _encode(value))
