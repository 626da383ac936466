"""Output of a chat completion as items, for APIs with another shape: text, reasoning, tool calls and their arguments.

Only the first choice is read, because these APIs have no others.
"""

import re
from typing import Any, Final, NamedTuple

import msgspec

from inferry.domain.errors import WorkerLost
from inferry.domain.streams import Delta
from inferry.domain.values import Value
from inferry.ingress.chunk_schema import ChatChunk, Choice, MessagePiece, TokenLogprob, ToolCallPiece
from inferry.ingress.text_logprobs import entries_of_text, logprobs_of

# An event whose only text is one piece of content, of reasoning or of a tool call's arguments; names, numbers and nulls
# surround it. Another event with the same bytes around its text differs in the text only.
_OF_A_CALL: Final = rb'(?:"id":null,|"type":null,|"type":"function",)*'
_PLAIN_EVENT: Final = re.compile(
    rb'(?P<before>data: ?\{[^\[\]\n]*"choices":\[\{"index":0,(?:"[a-z_]+":null,)*"delta":\{'
    rb'(?:"(?P<field>content|reasoning|reasoning_content)":'
    rb'|"tool_calls":\[\{'
    + _OF_A_CALL
    + rb'"index":(?P<call>\d+),'
    + _OF_A_CALL
    + rb'"function":\{(?:"name":null,)?"arguments":)")'
    rb'[^"\\\n]*(?:\\.[^"\\\n]*)*'
    rb'(?P<after>"(?(call)\}\}\])\}[^\[{\n"]*(?:"[a-z_]+":[^\[{\n"]*)*\n\n)\Z'
)
_decoder: Final = msgspec.json.Decoder(ChatChunk)
# Numbers: `in` takes bytes only after it has tried them as a number, which costs more than the search.
_QUOTE: Final = 0x22
_NEWLINE: Final = 0x0A


class Item(Value):
    """A piece of output."""


class Text(Item):
    """`logprobs` are those of its tokens, where they were asked for. The text of a token that is held back is empty."""

    def __init__(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        self.text: Final = text
        self.logprobs: Final = logprobs


class Reasoning(Item):
    def __init__(self, text: str) -> None:
        self.text: Final = text


class Refusal(Item):
    def __init__(self, text: str) -> None:
        self.text: Final = text


class ToolCall(Item):
    """The start of a tool call. `index` counts the tool calls of the answer."""

    def __init__(self, index: int, id: str, name: str) -> None:
        self.index: Final = index
        self.id: Final = id
        self.name: Final = name


class Arguments(Item):
    """The next piece of a tool call's arguments, which are JSON."""

    def __init__(self, index: int, text: str) -> None:
        self.index: Final = index
        self.text: Final = text


class PlainEvents:
    """Text of events that differ from a known event in their text only. They are not decoded."""

    __slots__ = ("_after", "_before", "_between", "_end", "_start")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._between = after + before
        self._start = len(before)
        self._end = -len(after)

    def text(self, raw: bytes) -> bytes | None:
        """The events' joined text as the inside of a JSON string; None where an event is of another kind."""
        if not (raw.startswith(self._before) and raw.endswith(self._after)):
            return None
        text = raw[self._start : self._end]
        if _QUOTE in text:
            text = text.replace(self._between, b"")
            # Another field shows as a quote that is not escaped, another event as a newline.
            if text.count(b'"') != text.count(b'\\"') or _NEWLINE in text:
                return None
        return text


class ItemReader:
    """Reads the deltas of one stream. `stop_reason` is the stop string or token that the engine reports at the end.
    `has_logprobs`: read the log probabilities of texts.
    """

    __slots__ = (
        "_calls",
        "_has_logprobs",
        "_ids",
        "_plain_arguments",
        "_plain_reasoning",
        "_plain_text",
        "stop_reason",
    )

    def __init__(self, *, has_logprobs: bool = False) -> None:
        self.stop_reason: str | int | None = None
        self._has_logprobs = has_logprobs
        self._plain_text: PlainEvents | None = None
        self._plain_reasoning: PlainEvents | None = None
        self._plain_arguments: PlainEvents | None = None  # of the last tool call
        self._ids: dict[int, int] = {}  # the engine's index of a tool call to its number in the answer
        self._calls = 0

    def text(self, raw: bytes) -> bytes | None:
        """The text of events without anything else, as the inside of a JSON string; None for other events."""
        plain = self._plain_text
        return None if plain is None else plain.text(raw)

    def reasoning(self, raw: bytes) -> bytes | None:
        """The same for events without anything but reasoning."""
        plain = self._plain_reasoning
        return None if plain is None else plain.text(raw)

    def arguments(self, raw: bytes) -> bytes | None:
        """The same for events without anything but arguments of the last tool call."""
        plain = self._plain_arguments
        return None if plain is None else plain.text(raw)

    def read(self, delta: Delta) -> list[Item]:
        """The items of a delta, in order. Raises WorkerLost."""
        items: list[Item] = []
        if delta.raw:
            self._read_events(delta.raw, items)
        if delta.text:
            items.append(Text(delta.text))
        return items

    def _read_events(self, raw: bytes, items: list[Item]) -> None:
        start = 0
        while start < len(raw):
            end = raw.find(b"\n\n", start)
            end = len(raw) if end < 0 else end + 2
            event = raw[start:end]
            start = end
            data = _data_of(event)
            if not data or data == b"[DONE]":
                continue
            chunk = _decode(data)
            for choice in chunk.choices:
                if choice.index == 0:
                    self._read_choice(chunk, choice, items)
            if len(chunk.choices) == 1:
                self._learn(event)

    def _learn(self, event: bytes) -> None:
        found = _PLAIN_EVENT.match(event)
        if found is None:
            return
        plain = PlainEvents(found["before"], found["after"])
        field: bytes | None = found["field"]
        if field is None:
            if self._ids.get(int(found["call"])) == self._calls - 1:
                self._plain_arguments = plain
        elif field == b"content":
            self._plain_text = plain
        else:
            self._plain_reasoning = plain

    def _read_choice(self, chunk: ChatChunk, choice: Choice, items: list[Item]) -> None:
        if choice.delta is not None:
            start = len(items)
            self.read_message(chunk.id, choice.delta, items)
            if self._has_logprobs:
                _add_logprobs(items, start, logprobs_of(choice))
        if choice.finish_reason is not None:
            self.stop_reason = stop_reason_of(choice)

    def read_message(self, answer_id: str, message: MessagePiece, items: list[Item]) -> None:
        """Append the items of a message, or of a piece of one."""
        reasoning = message.reasoning or message.reasoning_content
        if reasoning:
            items.append(Reasoning(reasoning))
        if message.content:
            items.append(Text(message.content))
        if message.refusal:
            items.append(Refusal(message.refusal))
        for piece in message.tool_calls or ():
            self._read_call(answer_id, piece, items)

    def _read_call(self, answer_id: str, piece: ToolCallPiece, items: list[Item]) -> None:
        function = piece.function
        name = None if function is None else function.name
        at = piece.index
        if at is None:  # without an index, a name begins the next call
            at = self._calls if name else self._calls - 1
        number = self._ids.get(at)
        if number is None:
            if not name:
                raise WorkerLost("the worker sent a tool call without a name")
            number = self._ids[at] = self._calls
            self._calls += 1
            self._plain_arguments = None
            items.append(ToolCall(number, piece.id or f"call_{answer_id}_{number}", name))
        arguments = None if function is None else function.arguments
        if arguments:
            text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            items.append(Arguments(number, text))


class Answer(NamedTuple):
    """A whole answer. `finish` and `stop_reason` say why it ended."""

    items: list[Item]
    finish: str
    usage: dict[str, Any] | None
    stop_reason: str | int | None


def read_answer(answer: bytes | dict[str, Any], *, has_logprobs: bool = False) -> Answer:
    """The items of a whole chat completion. Raises WorkerLost."""
    whole = _decode(answer if isinstance(answer, bytes) else msgspec.json.encode(answer))
    choice = whole.choices[0] if whole.choices else None
    if choice is None or choice.message is None:
        raise WorkerLost("the worker sent an answer without a message")
    items: list[Item] = []
    ItemReader().read_message(whole.id, choice.message, items)
    if has_logprobs and choice.message.content:
        _add_logprobs(items, 0, entries_of_text(choice.message.content, logprobs_of(choice)))
    return Answer(items, choice.finish_reason or "stop", whole.usage, stop_reason_of(choice))


def _add_logprobs(items: list[Item], start: int, entries: tuple[TokenLogprob, ...]) -> None:
    """Add the entries to the text among the items from `start`. Entries of reasoning and of tool calls are left out."""
    if not entries:
        return
    if len(items) == start:
        items.append(Text("", entries))
    for index in range(start, len(items)):
        item = items[index]
        if isinstance(item, Text):
            items[index] = Text(item.text, entries)


def stop_reason_of(choice: Choice) -> str | int | None:
    """The stop string or token that ended the choice; None where the engine does not report one."""
    if choice.stop_reason is not None:
        return choice.stop_reason
    matched = choice.matched_stop
    return matched if isinstance(matched, str | int) else None


def _decode(data: bytes) -> ChatChunk:
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise WorkerLost("the worker sent malformed events") from None


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    return b"".join([line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")])
