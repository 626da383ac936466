"""Server-sent events, read as they come: which of them bring tokens, and how the stream ended.

Most events say one more token and nothing else, and are told by counting; the others are decoded. JSON escapes quotes
inside strings, so neither `"finish_reason":null` nor `:""` can be part of what a model wrote.
"""

import msgspec
from msgspec import Raw, Struct

from inferry.adapters.workers.said import SaidEvent
from inferry.adapters.workers.sse import data_of, is_there, says_something

_MORE = b'"finish_reason":null'
_ROLE = b'"role"'
_EMPTY = b':""'


class _Error(Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


_decode_event = msgspec.json.Decoder(SaidEvent).decode
_decode_error = msgspec.json.Decoder(_Error).decode


class EventReader:
    """Follows one stream. `[DONE]` is not success: an error before it is what it says, and so is a missing end."""

    __slots__ = ("_rest", "cached", "error", "finish", "is_done", "message", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self._rest = b""
        self.finish: str | None = None
        self.error: str | None = None
        self.message = ""
        self.is_done = False
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached: int | None = None

    def feed(self, data: bytes) -> int:
        """Bytes as they came; how many events with tokens became complete by them."""
        if b"\r" in data:
            data = data.replace(b"\r", b"")
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not data.endswith(b"\n\n"):
            end = data.rfind(b"\n\n") + 2
            self._rest = data[end:] if end > 1 else data
            if end < 2:
                return 0
            data = data[:end]
        more = data.count(_MORE)
        if more and more == data.count(b"\n\n") and _ROLE not in data and _EMPTY not in data and self.error is None:
            return more
        return sum(map(self._look_closely, data.split(b"\n\n")))

    @property
    def failure(self) -> str | None:
        """Why the stream, now that it is over, is no answer."""
        if self.error is not None:
            return self.error
        if self.finish in ("abort", "error"):
            return f"ended by {self.finish}"
        return "broke off" if self.finish is None else None

    def _look_closely(self, event: bytes) -> bool:
        data = data_of(event)
        if not data or self.error is not None:
            return False
        if data == b"[DONE]":
            self.is_done = True
            return False
        try:
            said = _decode_event(data)
        except msgspec.MsgspecError:
            self.error = "not an event"
            return False
        if is_there(said.error):
            error = bytes(said.error)  # type: ignore[arg-type]
            self.error = f"in band: {_name_of(error)}"
            self.message = error[:300].decode(errors="replace")
            return False
        if said.usage is not None:
            details = said.usage.prompt_tokens_details
            self.prompt_tokens, self.output_tokens = said.usage.prompt_tokens, said.usage.completion_tokens
            self.cached = None if details is None else details.cached_tokens
        brings = False
        for choice in said.choices:
            if choice.finish_reason is not None:
                self.finish = choice.finish_reason
            brings = brings or says_something(choice)
        return brings


def error_name(body: bytes) -> str:
    """What a refusal calls itself, short enough to be counted by."""
    try:
        whole = msgspec.json.decode(body, type=dict[str, Raw])
    except msgspec.MsgspecError:
        return ""
    return _name_of(bytes(whole["error"])) if "error" in whole else ""


def _name_of(error: bytes) -> str:
    try:
        said = _decode_error(error)
    except msgspec.MsgspecError:
        return error[:60].decode(errors="replace").strip('"')
    name = said.code if isinstance(said.code, str) else said.type
    return name or said.message[:60] or str(said.code or "error")
