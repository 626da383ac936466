"""The turns of a Messages request, for `chat_messages`, which orders them. Texts stay JSON: they are copied."""

import re

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.anthropic.request_schema import Block, Source, Turn
from inferry.ingress.chat_messages import ChatMessage, ChatMessages
from inferry.ingress.errors import printable
from inferry.ingress.openai.decode import validation_error

BILLING_HEADER = b'"x-anthropic-billing-header:'
"""Claude Code's first system block. It differs from prompt to prompt, which would prevent prefix cache hits."""

_blocks_decoder = msgspec.json.Decoder(list[Block])
_encode = msgspec.json.encode
_QUOTE = 0x22
_MEDIA_TYPE = re.compile(r"image/[a-z0-9.+-]{1,64}")


class Conversation:
    """Collects turns. `images` are the paths of images in the request. `is_prefilled`: the answer continues the last
    message, known when `finish` returns.
    """

    def __init__(self) -> None:
        self.images: list[str] = []
        self.is_prefilled = False
        self._messages = ChatMessages()

    def add_system(self, content: Raw, path: str) -> None:
        """Add the request's `system`, or a system turn."""
        for index, block in enumerate(_blocks(content, path)):
            if block.type != "text":
                raise _unsupported(f"{path}[{index}]", block.type)
            text = _json_string(block.text, f"{path}[{index}].text")
            if not text.startswith(BILLING_HEADER):
                self._messages.add_system(text)

    def add_turn(self, turn: Turn, path: str) -> None:
        path = f"{path}.content"
        if turn.role == "system":
            self.add_system(turn.content, path)
            return
        self._messages.begin_turn(turn.role)
        blocks = _blocks(turn.content, path)
        if turn.role == "assistant":
            self._add_assistant(blocks, path)
            return
        self._add_user(blocks, path)
        if self._messages.is_turn_empty:
            raise InvalidRequest(f"`{path}` must not be empty", param=path)

    def finish(self) -> list[ChatMessage]:
        """All messages. Raises UnsupportedFeature where the last is the assistant's and has other content than text."""
        if self._messages.role == "assistant":
            self.is_prefilled = self._messages.end_prefill()
        return self._messages.finish()

    # -- turns -------------------------------------------------------------------------------------------------------

    def _add_user(self, blocks: list[Block], path: str) -> None:
        for index, block in enumerate(blocks):
            where = f"{path}[{index}]"
            if block.type == "text":
                self._messages.add_user(_json_string(block.text, f"{where}.text"))
            elif block.type == "image":
                self._add_image(block, where)
            elif block.type == "tool_result":
                self._add_tool_result(block, where)
            else:
                raise _unsupported(where, block.type)

    def _add_tool_result(self, block: Block, path: str) -> None:
        if not block.tool_use_id:
            raise InvalidRequest(f"`{path}.tool_use_id` is required", param=f"{path}.tool_use_id")
        texts: list[bytes] = []
        images: list[tuple[Block, str]] = []
        blocks = [] if block.content is UNSET else _blocks(block.content, f"{path}.content")
        for index, inner in enumerate(blocks):
            where = f"{path}.content[{index}]"
            if inner.type == "text":
                texts.append(_json_string(inner.text, f"{where}.text")[1:-1])
            elif inner.type == "image":  # the results of tools are text in chat requests
                images.append((inner, where))
            else:
                raise _unsupported(where, inner.type)
        content = b'"%b%b"' % (b"Error: " if block.is_error else b"", b"\\n".join(texts))
        self._messages.add_tool_result(block.tool_use_id, content)
        for image, where in images:
            self._add_image(image, where)

    def _add_assistant(self, blocks: list[Block], path: str) -> None:
        for index, block in enumerate(blocks):
            where = f"{path}[{index}]"
            if block.type == "text":
                self._messages.add_assistant(_json_string(block.text, f"{where}.text"))
            elif block.type == "thinking":
                self._messages.add_reasoning(_json_string(block.thinking, f"{where}.thinking"))
            elif block.type == "tool_use":
                self._messages.add_tool_call(block.id, block.name, _arguments(block, where))
            elif block.type != "redacted_thinking":  # encrypted: no engine can read it
                raise _unsupported(where, block.type)

    def _add_image(self, block: Block, path: str) -> None:
        source = block.source
        if source is None:
            raise InvalidRequest(f"`{path}.source` is required", param=f"{path}.source")
        self.images.append(f"{path}.image")
        url = _image_url(source, f"{path}.source")
        self._messages.add_user_part(b'{"type":"image_url","image_url":{"url":%b}}' % url)


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
        reason = wrong.message.removeprefix(f"`{wrong.param}`")
        raise InvalidRequest(f"`{param}`{reason}", param=param) from None


def _arguments(block: Block, path: str) -> bytes:
    """The arguments of a tool call: a JSON string with JSON in it."""
    if not block.id or not block.name:
        raise InvalidRequest(f"`{path}`: `id` and `name` are required", param=path)
    arguments = b"{}" if block.input is UNSET else bytes(block.input)
    if not arguments.startswith(b"{"):
        raise InvalidRequest(f"`{path}.input` must be an object", param=f"{path}.input")
    return _encode(arguments.decode())


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
