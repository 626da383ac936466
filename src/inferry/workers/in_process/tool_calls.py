"""Tool calls in the text of an engine, written as the events of a chat stream as soon as each part is known.

The engine decodes under a grammar, so that its text has the model's format, except where it is cut.
"""

from hashlib import blake2b
from typing import Any

import msgspec

from inferry.domain.constraints import Constraint
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import FinishReason, Usage
from inferry.domain.usage import usage_object
from inferry.engine.tool_formats import ToolFormat
from inferry.workers.in_process.logprobs_writer import event_start

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_ID_LENGTH = 9
"""Templates of Mistral take ids of nine letters and digits only."""
_encode = msgspec.json.encode


class ToolCallWriter:
    """Writes one answer. Text goes in, complete server-sent events come out."""

    def __init__(self, job: InferenceJob, constraint: Constraint, form: ToolFormat, created: float) -> None:
        self._job_id = job.job_id
        self._form = form
        self._open = event_start(job, created, is_chat=True)
        self._starts = {form.call_start(tool.name): tool.name for tool in constraint.tools}
        self._in_calls = constraint.must_call
        self._text = ""  # not written yet
        self._arguments: _JsonEnd | None = None  # of the call that is being written
        self._calls = 0
        self._has_begun = False
        self._has_text = False

    @property
    def has_calls(self) -> bool:
        return self._calls > 0

    def push(self, text: str, token_ids: tuple[int, ...], logprobs: bytes = b"") -> bytes:
        """The events of more text, that of these tokens. The first ones begin the stream.

        Log probabilities have an event of their own: text that may become a call is held back.
        """
        self._text += text
        events = [self._role()]
        if logprobs:
            events.append(self._delta(b"{}", logprobs))
        if not self._in_calls and self._form.begin_id in token_ids:  # special tokens have no text
            events.append(self._content(self._text))
            self._text, self._in_calls = "", True
        while event := self._next():
            events.append(event)
        return b"".join(events)

    def finish(self, finish: FinishReason, stop_reason: str | int | None) -> bytes:
        """The events of the text held back, and of the end."""
        rest = b"" if self._in_calls else self._content(self._text)
        ended: dict[str, Any] = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish.value}
        if stop_reason is not None:  # as vLLM writes it
            ended["stop_reason"] = stop_reason
        return self._role() + rest + self._open + _encode(ended) + b"]}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self._open + b'],"usage":%b}\n\n' % _encode(usage_object(usage))

    def _next(self) -> bytes:
        """The next event that the text allows, and the text without it."""
        if self._arguments is not None:
            return self._more_arguments(self._arguments)
        return self._next_call() if self._in_calls else self._free_text()

    def _free_text(self) -> bytes:
        """Text up to the begin of calls. Text that may become one is held back."""
        text, begin = self._text, self._form.begin
        if not text:
            return b""
        if not begin:  # calls are the whole answer or no part of it
            if self._has_text or not any(start.startswith(text[: len(start)]) for start in self._starts):
                self._text = ""
                return self._content(text)
            self._in_calls = any(text.startswith(start) for start in self._starts)
            return self._next_call() if self._in_calls else b""
        at = text.find(begin)
        if at >= 0:
            self._text, self._in_calls = text[at + len(begin) :], True
            return self._content(text[:at]) or self._next_call()
        held = next(size for size in range(min(len(begin) - 1, len(text)), -1, -1) if text.endswith(begin[:size]))
        self._text = text[len(text) - held :]
        return self._content(text[: len(text) - held])

    def _next_call(self) -> bytes:
        """The start of a call. The text between calls is dropped."""
        at = self._text.find("{")
        if at < 0:
            self._text = ""
            return b""
        text = self._text[at:]
        start = next((start for start in self._starts if text.startswith(start)), None)
        if start is None:
            return b""
        self._text, self._arguments = text[len(start) :], _JsonEnd()
        function = {"name": self._starts[start], "arguments": ""}
        call = {"index": self._calls, "id": _call_id(self._job_id, self._calls), "type": "function"}
        self._calls += 1
        return self._delta(b'{"tool_calls":[%b]}' % _encode(call | {"function": function}))

    def _more_arguments(self, end: "_JsonEnd") -> bytes:
        size = end.find(self._text)
        text = self._text[:size]
        if end.is_reached:
            # The brace after the arguments ends the call.
            self._text, self._arguments = self._text[size:].removeprefix("}"), None
        else:
            self._text = ""
        if not text:
            return b""
        arguments = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (self._calls - 1, _encode(text))
        return self._delta(arguments)

    def _content(self, text: str) -> bytes:
        if not text:
            return b""
        self._has_text = True
        return self._delta(b'{"content":%b}' % _encode(text))

    def _role(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._delta(b'{"role":"assistant","content":""}')

    def _delta(self, delta: bytes, logprobs: bytes = b"null") -> bytes:
        return self._open + b'{"index":0,"delta":%b,"logprobs":%b,"finish_reason":null}]}\n\n' % (delta, logprobs)


class _JsonEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_reached = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int:
        """How many characters of the next piece belong to the object."""
        for at, character in enumerate(text, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_reached = True
                    return at
        return len(text)


def _call_id(job_id: str, number: int) -> str:
    digest = int.from_bytes(blake2b(f"{job_id}\n{number}".encode(), digest_size=8).digest(), "big")
    letters = []
    for _ in range(_ID_LENGTH):
        digest, letter = divmod(digest, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[letter])
    return "".join(letters)
