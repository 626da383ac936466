"""Items of a response's output: messages, reasoning, calls of functions and of custom tools. Texts are JSON strings
without their quotes, in pieces."""

from typing import Final

import msgspec

from inferry.ingress.chunk_schema import TokenLogprob
from inferry.ingress.responses.conversation import sealed_reasoning
from inferry.ingress.responses.logprobs import item_logprobs
from inferry.ingress.responses.tools import ToolName, text_input

_encode = msgspec.json.encode

# Final: mypyc compiles them in.
TEXT: Final = 0
REFUSAL: Final = 1
REASONING: Final = 2
FUNCTION: Final = 3
CUSTOM: Final = 4
_ID_PREFIXES = ("msg", "msg", "rs", "fc", "ctc")


class OutputItem:
    """One item until it is complete. `call` is the number of the tool call."""

    __slots__ = ("_call_id", "_seals", "_tool", "call", "id", "index", "kind", "logprobs", "pieces")

    def __init__(
        self,
        kind: int,
        index: int,
        base: str,
        *,
        call: int = -1,
        call_id: str = "",
        tool: ToolName | None = None,
        seals: bool = False,
    ) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{_ID_PREFIXES[kind]}_{base}_{index}"
        self.call = call
        self.pieces: list[bytes] = []
        self.logprobs: list[TokenLogprob] = []
        self._call_id = call_id
        self._tool = tool
        self._seals = seals

    def text(self) -> bytes:
        """The whole text; of a custom tool's call its input."""
        text = b'"%b"' % b"".join(self.pieces)
        return _encode(text_input(msgspec.json.decode(text, type=str))) if self.kind == CUSTOM else text

    def part(self, text: bytes) -> bytes:
        """The content part of a message or of reasoning."""
        if self.kind == TEXT:
            logprobs = item_logprobs(self.logprobs) if self.logprobs else b"[]"
            return b'{"type":"output_text","text":%b,"annotations":[],"logprobs":%b}' % (text, logprobs)
        name = b"refusal" if self.kind == REFUSAL else b"reasoning_text"
        return b'{"type":"%b","%b":%b}' % (name, b"refusal" if self.kind == REFUSAL else b"text", text)

    def beginning(self) -> bytes:
        """The item without its text."""
        return self._render(b"in_progress", b"", b'""')

    def render(self, text: bytes, status: str) -> bytes:
        """The item with its whole text."""
        return self._render(status.encode(), self.part(text) if self.kind <= REASONING else b"", text)

    def _render(self, status: bytes, content: bytes, text: bytes) -> bytes:
        head = b'{"id":"%b","status":"%b",' % (self.id.encode(), status)
        if self.kind <= REFUSAL:
            return head + b'"type":"message","role":"assistant","content":[%b]}' % content
        if self.kind == REASONING:
            sealed = b"null"
            if self._seals and content:
                sealed = _encode(sealed_reasoning(msgspec.json.decode(text, type=str)))
            return head + b'"type":"reasoning","summary":[],"content":[%b],"encrypted_content":%b}' % (content, sealed)
        tool = self._tool
        assert tool is not None
        head += b'"call_id":%b,"name":%b,' % (_encode(self._call_id), _encode(tool.name))
        if tool.namespace is not None:
            head += b'"namespace":%b,' % _encode(tool.namespace)
        if self.kind == CUSTOM:
            return head + b'"type":"custom_tool_call","input":%b}' % text
        return head + b'"type":"function_call","arguments":%b}' % text
