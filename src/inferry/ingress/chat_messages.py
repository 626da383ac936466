"""Chat messages from the turns of a conversation: which are merged, and in which order tool results follow.

All chat templates take this form: one leading system message, then user and assistant messages in turn, with the
results of tools directly after the message that called them, in the order of the calls. Many templates write no ids of
calls, and Claude Code sends the results of parallel calls in the order in which the calls ended. Consecutive turns of
one role are one message. System text within the conversation becomes part of the user message beside it, in `<system>`
tags: merged into the leading message it would change the prefix of every later call.

Texts are JSON strings: they are copied from one body into another.
"""

from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from inferry.domain.errors import UnsupportedFeature
from inferry.ingress.openai.request_schema import MessageSchema

_encode = msgspec.json.encode
_EMPTY: Final = b'""'
_TEXT: Final = b'{"type":"text","text":'


class ChatMessage(NamedTuple):
    """One chat message. `content` is JSON; `fields` are further fields, each after a comma."""

    role: str
    content: bytes
    fields: bytes = b""

    @property
    def json(self) -> bytes:
        return b'{"role":"%b","content":%b%b}' % (self.role.encode(), self.content, self.fields)

    @property
    def schema(self) -> MessageSchema:
        return MessageSchema(self.role, Raw(self.content))  # type: ignore[arg-type]


class ChatMessages:
    """Collects turns. `role` is that of the turn that was begun last; empty before the first."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._system: list[bytes] = []
        self._tool_results: list[tuple[int, ChatMessage]] = []
        self._user_parts: list[bytes] = []
        self._assistant_parts: list[bytes] = []
        self._reasoning: list[bytes] = []
        self._tool_calls: list[bytes] = []
        self._call_places: dict[str, int] = {}
        self.role = ""

    @property
    def is_turn_empty(self) -> bool:
        """Whether the user's turn has no content yet."""
        return not self._user_parts and not self._tool_results

    def add_system(self, text: bytes) -> None:
        if text == _EMPTY:
            return
        if not self.role:
            self._system.append(text)
        else:
            self.begin_turn("user")
            self._user_parts.append(_text_part(b'"<system>\\n%b\\n</system>"' % text[1:-1]))

    def add_user(self, text: bytes) -> None:
        self.begin_turn("user")
        if text != _EMPTY:
            self._user_parts.append(_text_part(text))

    def add_user_part(self, part: bytes) -> None:
        """Add a part other than text."""
        self.begin_turn("user")
        self._user_parts.append(part)

    def add_tool_result(self, call_id: str, text: bytes) -> None:
        self.begin_turn("user")
        message = ChatMessage("tool", text, b',"tool_call_id":' + _encode(call_id))
        self._tool_results.append((self._call_places.get(call_id, len(self._call_places)), message))

    def add_assistant(self, text: bytes) -> None:
        self.begin_turn("assistant")
        if text != _EMPTY:
            self._assistant_parts.append(_text_part(text))

    def add_reasoning(self, text: bytes) -> None:
        self.begin_turn("assistant")
        self._reasoning.append(text[1:-1])

    def add_tool_call(self, id: str, name: str, arguments: bytes) -> None:
        """`arguments` is a JSON string with JSON in it."""
        self.begin_turn("assistant")
        self._call_places[id] = len(self._tool_calls)
        self._tool_calls.append(
            b'{"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}'
            % (_encode(id), _encode(name), arguments)
        )

    def end_prefill(self) -> bool:
        """End an assistant turn whose text the answer continues; whether there is such text. An empty turn is dropped.

        Raises UnsupportedFeature where the turn has other content.
        """
        if self._tool_calls or self._reasoning:
            raise UnsupportedFeature(
                "`messages`: the last message is continued, so it may have text only", param="messages"
            )
        texts = [part[len(_TEXT) + 1 : -2] for part in self._assistant_parts]
        self._assistant_parts, self.role = [], ""
        if texts:
            self._messages.append(ChatMessage("assistant", b'"%b"' % b"".join(texts)))
        return bool(texts)

    def finish(self) -> list[ChatMessage]:
        self._end_turn()
        if self._system:
            system = b"\\n\\n".join([text[1:-1] for text in self._system])
            return [ChatMessage("system", b'"%b"' % system), *self._messages]
        return self._messages

    def begin_turn(self, role: str) -> None:
        if role != self.role:
            self._end_turn()
            self.role = role
            if role == "assistant":
                self._call_places.clear()

    def _end_turn(self) -> None:
        """Write the messages of the turn."""
        if self.role == "assistant":
            fields = b""
            if self._reasoning:
                fields += b',"reasoning_content":"%b"' % b"".join(self._reasoning)
            if self._tool_calls:
                fields += b',"tool_calls":[%b]' % b",".join(self._tool_calls)
            content = _content(self._assistant_parts) or (b"null" if self._tool_calls else _EMPTY)
            self._messages.append(ChatMessage("assistant", content, fields))
            self._assistant_parts, self._reasoning, self._tool_calls = [], [], []
            return
        self._tool_results.sort(key=_place)
        self._messages += [message for _, message in self._tool_results]
        if self._user_parts:
            self._messages.append(ChatMessage("user", _content(self._user_parts)))
        self._tool_results, self._user_parts = [], []


def _place(result: tuple[int, ChatMessage]) -> int:
    return result[0]


def _content(parts: list[bytes]) -> bytes:
    """Parts as the content of a chat message: a single text as a string, which every engine accepts."""
    if len(parts) == 1 and parts[0].startswith(_TEXT):
        return parts[0][len(_TEXT) : -1]
    return b"[%b]" % b",".join(parts) if parts else b""


def _text_part(text: bytes) -> bytes:
    return _TEXT + text + b"}"
