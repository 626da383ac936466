"""The server-sent events of one response, and its object at the end.

Events with text are written around the engine's own bytes where those hold nothing but text: this runs once per token.
"""

from typing import Any

import msgspec

from inferry.domain.errors import GatewayError, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, Done
from inferry.ingress.chat_items import Arguments, Item, ItemReader, Reasoning, Refusal, Text, ToolCall
from inferry.ingress.chunk_schema import TokenLogprob
from inferry.ingress.openai.render import early_stop_object
from inferry.ingress.responses.logprobs import event_logprobs
from inferry.ingress.responses.output_items import CUSTOM, FUNCTION, REASONING, REFUSAL, TEXT, OutputItem
from inferry.ingress.responses.response_object import ID_PREFIX, Keep, ResponseObject, error_object, usage_object
from inferry.ingress.responses.tools import ToolName
from inferry.ingress.text_logprobs import entries_of_text

_encode = msgspec.json.encode
_DELTAS = (
    b"response.output_text.delta",
    b"response.refusal.delta",
    b"response.reasoning_text.delta",
    b"response.function_call_arguments.delta",
    b"response.custom_tool_call_input.delta",
)
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseWriter:
    """At most one item is open at a time; it ends when another begins."""

    __slots__ = (
        "_before",
        "_head",
        "_item",
        "_job",
        "_keep",
        "_output",
        "_pending",
        "_reader",
        "_sequence",
        "_started",
    )

    def __init__(self, head: ResponseObject, job: InferenceJob, keep: Keep | None) -> None:
        self._head = head
        self._job = job
        self._keep = keep
        self._reader = ItemReader(has_logprobs=head.has_logprobs)
        self._pending: list[TokenLogprob] = []  # of tokens that are held back, or of no text
        self._started = False
        self._sequence = head.first_events
        self._output: list[bytes] = []
        self._item: OutputItem | None = None
        self._before = b""  # the beginning of an event with the next piece of the open item

    def piece(self, delta: Delta) -> bytes:
        item = self._item
        if item is not None and not delta.text:
            text: bytes | None = None
            if item.kind == TEXT:
                text = self._reader.text(delta.raw)
            elif item.kind == FUNCTION:
                text = self._reader.arguments(delta.raw)
            elif item.kind == REASONING:
                text = self._reader.reasoning(delta.raw)
            if text is not None:
                return self._delta(item, text)
        events = self._start()
        for one in self._reader.read(delta):
            self.write(one, events)
        return b"".join(events)

    def last(self, done: Done, *, include_usage: bool) -> bytes:
        events = self._start()
        usage = done.usage
        counts = usage_object(
            usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, _reasoning_tokens(done.raw)
        )
        status, response = self.finish(done.finish.value, counts, events)
        more = b"" if done.stopped is None else b',"inferry":' + _encode(early_stop_object(done.stopped))
        events.append(self._event(b"response." + status.encode(), b'"response":' + response + more))
        return b"".join(events)

    def heartbeat(self) -> bytes:
        events = self._start()
        if not events:
            events.append(self._event(b"keepalive", b""))
        return b"".join(events)

    def failed(self, error: GatewayError) -> bytes:
        """The last event of a stream that has failed. Items that were complete stay in the response."""
        events = self._start()
        response = self._head.of_job(self._job, "failed", self._output, None, error=error_object(error))
        self._end(response)
        events.append(self._event(b"response.failed", b'"response":' + response))
        return b"".join(events)

    def write(self, item: Item, events: list[bytes]) -> None:
        """Add an item of the answer."""
        current = self._item
        if isinstance(item, Arguments):
            if current is None or item.index != current.call:
                raise WorkerLost("the worker mixed the arguments of several tool calls")
            self._append(current, item.text, events)
        elif isinstance(item, ToolCall):
            tool = self._head.names.get(item.name) or ToolName(item.name)
            kind = CUSTOM if tool.is_custom else FUNCTION
            self._open(kind, events, call=item.index, call_id=item.id, tool=tool)
        elif isinstance(item, Text):
            self._append_text(item, events)
        elif isinstance(item, Reasoning):
            self._append(self._message(REASONING, events), item.text, events)
        elif isinstance(item, Refusal):
            self._append(self._message(REFUSAL, events), item.text, events)

    def finish(self, finish: str, usage: dict[str, Any], events: list[bytes]) -> tuple[str, bytes]:
        """End the response: its status and its object."""
        if self._item is None:
            self._open(TEXT, events)  # clients expect an item
        reason = _INCOMPLETE.get(finish)
        job, head = self._job, self._head
        if reason is None:
            self._close(events, "completed")
            response = head.of_job(job, "completed", self._output, usage, completed_at=int(head.wall()))
        else:
            self._close(events, "incomplete")
            response = head.of_job(job, "incomplete", self._output, usage, incomplete_details={"reason": reason})
        self._end(response)
        return "completed" if reason is None else "incomplete", response

    def _start(self) -> list[bytes]:
        """The first events, once."""
        if self._started:
            return []
        self._started = True
        response = b'"response":' + self._head.of_job(self._job, "in_progress", [])
        created = [] if self._head.first_events else [self._event(b"response.created", response)]
        return [*created, self._event(b"response.in_progress", response)]

    def _end(self, response: bytes) -> None:
        if self._keep is not None:
            self._keep(self._job, self._head.id_of(self._job), response)

    def _message(self, kind: int, events: list[bytes]) -> OutputItem:
        current = self._item
        return current if current is not None and current.kind == kind else self._open(kind, events)

    def _open(
        self, kind: int, events: list[bytes], *, call: int = -1, call_id: str = "", tool: ToolName | None = None
    ) -> OutputItem:
        self._close(events, "completed")
        if kind != TEXT:
            self._pending.clear()
        index = len(self._output)
        base = self._head.id_of(self._job).removeprefix(ID_PREFIX)
        seals = self._head.seals_reasoning
        item = self._item = OutputItem(kind, index, base, call=call, call_id=call_id, tool=tool, seals=seals)
        events.append(
            self._event(b"response.output_item.added", b'"output_index":%d,"item":%b' % (index, item.beginning()))
        )
        if kind <= REASONING:
            events.append(self._event(b"response.content_part.added", _place(item) + b',"part":%b' % item.part(b'""')))
        name = _DELTAS[kind]
        logprobs = b'"logprobs":[],' if kind == TEXT else b""
        self._before = b'event: %b\ndata: {"type":"%b",%b,%b"delta":"' % (name, name, _place(item), logprobs)
        return item

    def _append_text(self, piece: Text, events: list[bytes]) -> None:
        self._pending += piece.logprobs
        if not piece.text:
            return
        item = self._message(TEXT, events)
        if not self._pending:
            self._append(item, piece.text, events)
            return
        entries = entries_of_text(piece.text, tuple(self._pending))
        self._pending.clear()
        item.logprobs += entries
        encoded = _encode(piece.text)
        item.pieces.append(encoded[1:-1])
        fields = b'%b,"logprobs":%b,"delta":%b' % (_place(item), event_logprobs(entries), encoded)
        events.append(self._event(_DELTAS[TEXT], fields))

    def _append(self, item: OutputItem, text: str, events: list[bytes]) -> None:
        encoded = _encode(text)[1:-1]
        if item.kind == CUSTOM:
            item.pieces.append(encoded)  # JSON around the input: it is written once it is complete
        else:
            events.append(self._delta(item, encoded))

    def _delta(self, item: OutputItem, text: bytes) -> bytes:
        item.pieces.append(text)
        number = self._sequence
        self._sequence = number + 1
        return b'%b%b","sequence_number":%d}\n\n' % (self._before, text, number)

    def _close(self, events: list[bytes], status: str) -> None:
        item = self._item
        if item is None:
            return
        text, place = item.text(), _place(item)
        if item.kind == CUSTOM:
            events.append(self._event(_DELTAS[CUSTOM], place + b',"delta":' + text))
        name = _DELTAS[item.kind].removesuffix(b"delta") + b"done"
        logprobs = b',"logprobs":' + event_logprobs(item.logprobs) if item.kind == TEXT else b""
        events.append(self._event(name, b'%b%b,"%b":%b' % (place, logprobs, _TEXT_FIELDS[item.kind], text)))
        if item.kind <= REASONING:
            events.append(self._event(b"response.content_part.done", place + b',"part":%b' % item.part(text)))
        done = item.render(text, status)
        events.append(self._event(b"response.output_item.done", b'"output_index":%d,"item":%b' % (item.index, done)))
        self._output.append(done)
        self._item = None

    def _event(self, name: bytes, fields: bytes) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        rest = b"," + fields if fields else b""
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d%b}\n\n' % (name, name, number, rest)


_TEXT_FIELDS = (b"text", b"refusal", b"text", b"arguments", b"input")


def _place(item: OutputItem) -> bytes:
    place = b'"item_id":"%b","output_index":%d' % (item.id.encode(), item.index)
    return place + b',"content_index":0' if item.kind <= REASONING else place


def _reasoning_tokens(usage_event: bytes) -> int:
    """Reasoning tokens that the engine reports with its usage."""
    try:
        usage = msgspec.json.decode(usage_event.removeprefix(b"data:"))["usage"] if usage_event else {}
        return reasoning_tokens(usage)
    except (msgspec.DecodeError, TypeError, KeyError):
        return 0


def reasoning_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("completion_tokens_details")
    found = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return found if isinstance(found, int) and found > 0 else 0
