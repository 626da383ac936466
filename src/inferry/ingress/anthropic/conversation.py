"""The turns of a Messages request as chat messages.

Chat templates differ in what they accept, so the result has a form that all of them take: one leading system message,
then user and assistant messages in turn, with the results of tools directly after the message that called them.
Consecutive turns of one role are one message. A system turn within the conversation becomes part of the user message
beside it, in `<system>` tags: merged into the leading message it would change the prefix of every later call.

Texts stay JSON: they are copied from one body into the other.
"""

import re
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.anthropic.request_schema import Block, Source, Turn
from inferry.ingress.errors import printable
from inferry.ingress.openai.decode import validation_error
from inferry.ingress.openai.request_schema import MessageSchema

BILLING_HEADER = b'"x-anthropic-billing-header:'
"""Claude Code's first system block. It differs from prompt to prompt, which would prevent prefix cache hits."""

_blocks_decoder = msgspec.json.Decoder(list[Block])
_encode = msgspec.json.encode
_QUOTE = 0x22
_EMPTY = b'""'
_TEXT = b'{"type":"text","text":'
_MEDIA_TYPE = re.compile(r"image/[a-z0-9.+-]{1,64}")


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


class Conversation:
    """Collects turns. `images` are the paths of images in the request."""

    def __init__(self) -> None:
        self.images: list[str] = []
        self._messages: list[ChatMessage] = []
        self._system: list[bytes] = []
        self._tool_results: list[ChatMessage] = []
        self._user_parts: list[bytes] = []
        self._assistant_parts: list[bytes] = []
        self._reasoning: list[bytes] = []
        self._tool_calls: list[bytes] = []
        self._role = ""

    def add_system(self, content: Raw, path: str) -> None:
        """Add the request's `system`, or a system turn."""
        for index, block in enumerate(_blocks(content, path)):
            if block.type != "text":
                raise _unsupported(f"{path}[{index}]", block.type)
            text = _json_string(block.text, f"{path}[{index}].text")
            if text.startswith(BILLING_HEADER) or text == _EMPTY:
                continue
            if not self._role:
                self._system.append(text)
            else:
                self._begin_turn("user")
                self._user_parts.append(_text_part(b'"<system>\\n%b\\n</system>"' % text[1:-1]))

    def add_turn(self, turn: Turn, path: str) -> None:
        path = f"{path}.content"
        if turn.role == "system":
            self.add_system(turn.content, path)
            return
        self._begin_turn(turn.role)
        blocks = _blocks(turn.content, path)
        if turn.role == "assistant":
            self._add_assistant(blocks, path)
            return
        self._add_user(blocks, path)
        if not self._user_parts and not self._tool_results:
            raise InvalidRequest(f"`{path}` must not be empty", param=path)

    def finish(self) -> list[ChatMessage]:
        """All messages. Raises UnsupportedFeature where the answer would have to continue an assistant message."""
        if self._role == "assistant":
            raise UnsupportedFeature(
                "`messages`: the last message must be of the user; prefilled answers are not supported",
                param="messages",
            )
        self._end_turn()
        if self._system:
            system = b"\\n\\n".join([text[1:-1] for text in self._system])
            return [ChatMessage("system", b'"%b"' % system), *self._messages]
        return self._messages

    # -- turns -------------------------------------------------------------------------------------------------------

    def _add_user(self, blocks: list[Block], path: str) -> None:
        for index, block in enumerate(blocks):
            where = f"{path}[{index}]"
            if block.type == "text":
                text = _json_string(block.text, f"{where}.text")
                if text != _EMPTY:
                    self._user_parts.append(_text_part(text))
            elif block.type == "image":
                self._user_parts.append(self._image(block, where))
            elif block.type == "tool_result":
                self._add_tool_result(block, where)
            else:
                raise _unsupported(where, block.type)

    def _add_tool_result(self, block: Block, path: str) -> None:
        if not block.tool_use_id:
            raise InvalidRequest(f"`{path}.tool_use_id` is required", param=f"{path}.tool_use_id")
        texts: list[bytes] = []
        blocks = [] if block.content is UNSET else _blocks(block.content, f"{path}.content")
        for index, inner in enumerate(blocks):
            where = f"{path}.content[{index}]"
            if inner.type == "text":
                texts.append(_json_string(inner.text, f"{where}.text")[1:-1])
            elif inner.type == "image":  # the results of tools are text in chat requests
                self._user_parts.append(self._image(inner, where))
            else:
                raise _unsupported(where, inner.type)
        content = b'"%b%b"' % (b"Error: " if block.is_error else b"", b"\\n".join(texts))
        call = b',"tool_call_id":' + _encode(block.tool_use_id)
        self._tool_results.append(ChatMessage("tool", content, call))

    def _add_assistant(self, blocks: list[Block], path: str) -> None:
        for index, block in enumerate(blocks):
            where = f"{path}[{index}]"
            if block.type == "text":
                text = _json_string(block.text, f"{where}.text")
                if text != _EMPTY:
                    self._assistant_parts.append(_text_part(text))
            elif block.type == "thinking":
                self._reasoning.append(_json_string(block.thinking, f"{where}.thinking")[1:-1])
            elif block.type == "tool_use":
                self._tool_calls.append(_tool_call(block, where))
            elif block.type != "redacted_thinking":  # encrypted: no engine can read it
                raise _unsupported(where, block.type)

    def _image(self, block: Block, path: str) -> bytes:
        source = block.source
        if source is None:
            raise InvalidRequest(f"`{path}.source` is required", param=f"{path}.source")
        self.images.append(f"{path}.image")
        return b'{"type":"image_url","image_url":{"url":%b}}' % _image_url(source, f"{path}.source")

    def _begin_turn(self, role: str) -> None:
        if role != self._role:
            self._end_turn()
            self._role = role

    def _end_turn(self) -> None:
        """Write the messages of the turn."""
        if self._role == "assistant":
            fields = b""
            if self._reasoning:
                fields += b',"reasoning_content":"%b"' % b"".join(self._reasoning)
            if self._tool_calls:
                fields += b',"tool_calls":[%b]' % b",".join(self._tool_calls)
            content = _content(self._assistant_parts) or (b"null" if self._tool_calls else _EMPTY)
            self._messages.append(ChatMessage("assistant", content, fields))
            self._assistant_parts, self._reasoning, self._tool_calls = [], [], []
            return
        self._messages += self._tool_results
        if self._user_parts:
            self._messages.append(ChatMessage("user", _content(self._user_parts)))
        self._tool_results, self._user_parts = [], []


def _blocks(content: Raw, path: str) -> list[Block]:
    """The blocks of a content: a string is one block of text."""
    if memoryview(content)[0] == _QUOTE:
        return [Block("text", text=content)]
    try:
        return _blocks_decoder.decode(content)
    except msgspec.ValidationError as error:
        wrong = validation_error(error)
        if wrong.param is None:
            raise InvalidRequest(f"`{path}` must be text or a list of blocks", param=path) from None
        param = f"{path}{wrong.param}"
        raise InvalidRequest(f"`{param}`: {wrong.message.partition(': ')[2]}", param=param) from None


def _content(parts: list[bytes]) -> bytes:
    """Parts as the content of a chat message: a single text as a string, which every engine accepts."""
    if len(parts) == 1 and parts[0].startswith(_TEXT):
        return parts[0][len(_TEXT) : -1]
    return b"[%b]" % b",".join(parts) if parts else b""


def _text_part(text: bytes) -> bytes:
    return _TEXT + text + b"}"


def _tool_call(block: Block, path: str) -> bytes:
    if not block.id or not block.name:
        raise InvalidRequest(f"`{path}`: `id` and `name` are required", param=path)
    arguments = b"{}" if block.input is UNSET else bytes(block.input)
    if not arguments.startswith(b"{"):
        raise InvalidRequest(f"`{path}.input` must be an object", param=f"{path}.input")
    return b'{"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}' % (
        _encode(block.id),
        _encode(block.name),
        _encode(arguments.decode()),
    )


def _image_url(source: Source, path: str) -> bytes:
    if source.type == "url":
        return _json_string(source.url, f"{path}.url")
    if source.type != "base64":
        raise _unsupported(path, source.type)
    if _MEDIA_TYPE.fullmatch(source.media_type) is None:
        raise InvalidRequest(f"`{path}.media_type` must be the type of an image", param=f"{path}.media_type")
    data = _json_string(source.data, f"{path}.data")
    return b'"data:%b;base64,%b"' % (source.media_type.encode(), data[1:-1])


def _json_string(raw: Raw | UnsetType, path: str) -> bytes:
    """A field that must be a string, as JSON."""
    text = b"" if raw is UNSET else bytes(raw)
    if not text.startswith(b'"'):
        raise InvalidRequest(f"`{path}` must be text", param=path)
    return text


def _unsupported(path: str, kind: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"`{path}`: blocks of the type `{printable(kind)}` are not supported", param=path)
