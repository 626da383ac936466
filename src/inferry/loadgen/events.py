"""Server-sent events as they arrive: which of them carry tokens, and how the stream ended.

Most events carry one token and nothing else and are only counted; the others are decoded. JSON escapes quotes inside
strings, so neither `"finish_reason":null` nor `:""` can be part of a model's output.
"""

import msgspec
from msgspec import Raw, Struct

from inferry.workers.openai_http.chunk_schema import StreamEvent
from inferry.workers.openai_http.sse import data_of, has_output, is_present

_MORE = b'"finish_reason":null'
_ROLE = b'"role"'
_EMPTY = b':""'


class _Error(Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


_decode_event = msgspec.json.Decoder(StreamEvent).decode
_decode_error = msgspec.json.Decoder(_Error).decode


class EventReader:
    """Follows one stream. `[DONE]` alone is not success: an error event or a missing end is a failure."""

    __slots__ = ("_buffer", "cached", "error", "finish", "is_done", "message", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self._buffer = b""
        self.finish: str | None = None
        self.error: str | None = None
        self.message = ""
        self.is_done = False
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached: int | None = None

    def feed(self, data: bytes) -> int:
        """Add received bytes; how many events with tokens they completed."""
        if b"\r" in data:
            data = data.replace(b"\r", b"")
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if not data.endswith(b"\n\n"):
            end = data.rfind(b"\n\n") + 2
            self._buffer = data[end:] if end > 1 else data
            if end < 2:
                return 0
            data = data[:end]
        more = data.count(_MORE)
        if more and more == data.count(b"\n\n") and _ROLE not in data and _EMPTY not in data and self.error is None:
            return more
        return sum(map(self._parse_event, data.split(b"\n\n")))

    @property
    def failure(self) -> str | None:
        """Why the ended stream is a failure, or None."""
        if self.error is not None:
            return self.error
        if self.finish in ("abort", "error"):
            return f"ended by {self.finish}"
        return "broke off" if self.finish is None else None

    def _parse_event(self, event: bytes) -> bool:
        data = data_of(event)
        if not data or self.error is not None:
            return False
        if data == b"[DONE]":
            self.is_done = True
            return False
        try:
            decoded = _decode_event(data)
        except msgspec.MsgspecError:
            self.error = "not an event"
            return False
        if is_present(decoded.error):
            error = bytes(decoded.error)  # type: ignore[arg-type]
            self.error = f"in band: {_error_name(error)}"
            self.message = error[:300].decode(errors="replace")
            return False
        if decoded.usage is not None:
            details = decoded.usage.prompt_tokens_details
            self.prompt_tokens, self.output_tokens = decoded.usage.prompt_tokens, decoded.usage.completion_tokens
            self.cached = None if details is None else details.cached_tokens
        has_tokens = False
        for choice in decoded.choices:
            if choice.finish_reason is not None:
                self.finish = choice.finish_reason
            has_tokens = has_tokens or has_output(choice)
        return has_tokens


def error_name(body: bytes) -> str:
    """The error code of a refusal, shortened, as a key for counting."""
    try:
        body_json = msgspec.json.decode(body, type=dict[str, Raw])
    except msgspec.MsgspecError:
        return ""
    return _error_name(bytes(body_json["error"])) if "error" in body_json else ""


def _error_name(error: bytes) -> str:
    try:
        decoded = _decode_error(error)
    except msgspec.MsgspecError:
        return error[:60].decode(errors="replace").strip('"')
    name = decoded.code if isinstance(decoded.code, str) else decoded.type
    return name or decoded.message[:60] or str(decoded.code or "error")
