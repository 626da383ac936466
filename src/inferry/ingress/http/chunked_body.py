"""Decoder for bodies in chunks.

Chunk extensions and trailers are checked for their grammar (RFC 9112, 7.1), counted against a limit, and dropped: no
trailer becomes a header.
"""

import enum
import re
from typing import Final

from inferry.ingress.http.request_head import DelimitedBuffer, HttpProtocolError

MAX_EXTRA_BYTES: Final = 16_384
"""Limit per request for lines with chunk extensions and for trailers."""

_MAX_SIZE_LINE_BYTES: Final = 18  # sixteen digits and the line break
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED: Final = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t \x21-\x7e\x80-\xff])*"'
_EXTENSION = rb"[ \t]*;[ \t]*" + _TOKEN + rb"(?:[ \t]*=[ \t]*(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?"
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:" + _EXTENSION + rb")*\r\n")
_PARTIAL_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}(?:[ \t;\r]|\Z)")
_TRAILERS = re.compile(rb"(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)+\r\n")


class _State(enum.Enum):
    """What is expected next."""

    SIZE = "size"
    DATA = "data"
    CR = "cr"
    LF = "lf"
    TRAILERS = "trailers"
    LAST_LF = "last lf"
    NOTHING = "nothing"


class ChunkedDecoder:
    """One body in chunks. The next `remaining` bytes are data; where that is 0, `read_framing` comes next."""

    __slots__ = ("_buffer", "_extra", "_next", "remaining")

    def __init__(self) -> None:
        self.remaining = 0
        self._next = _State.SIZE
        self._buffer: DelimitedBuffer | None = None
        self._extra = MAX_EXTRA_BYTES

    @property
    def is_over(self) -> bool:
        return self._next is _State.NOTHING

    def advance(self, size: int) -> None:
        """Count `size` bytes of data as read."""
        self.remaining -= size
        if not self.remaining:
            self._next = _State.CR

    def read_framing(self, data: bytes, at: int) -> int:
        """Read framing from offset `at`; return the offset behind it. Raises HttpProtocolError."""
        state = self._next
        if state is _State.CR:
            if data[at] != 13:
                raise _malformed()
            self._next = _State.LF
            return at + 1
        if state is _State.LF or state is _State.LAST_LF:
            if data[at] != 10:
                raise _malformed()
            self._next = _State.SIZE if state is _State.LF else _State.NOTHING
            return at + 1
        if state is _State.SIZE:
            return self._read_size(data, at)
        if self._buffer is None and data[at] == 13:
            self._next = _State.LAST_LF
            return at + 1
        return self._read_trailers(data, at)

    def _read_size(self, data: bytes, at: int) -> int:
        if self._buffer is None:
            end = data.find(b"\n", at, at + _MAX_SIZE_LINE_BYTES) + 1
            if end:
                self._start_chunk(data[at:end])
                return end
            self._buffer = DelimitedBuffer(b"\n", max(_MAX_SIZE_LINE_BYTES, self._extra))
        buffer = self._buffer
        at = buffer.feed(data, at)
        if buffer.is_complete:
            self._buffer = None
            self._start_chunk(bytes(buffer.text))
        elif _PARTIAL_SIZE.match(buffer.text) is None or buffer.has_stray_control():
            raise _malformed()
        elif buffer.is_over:
            raise _too_many_extra_bytes()
        return at

    def _start_chunk(self, line: bytes) -> None:
        size = _SIZE.fullmatch(line)
        if size is None:
            raise _malformed()
        if size.end(1) != len(line) - 2:
            self._charge_extra(len(line))
        self.remaining = int(size[1], 16)
        self._next = _State.DATA if self.remaining else _State.TRAILERS

    def _read_trailers(self, data: bytes, at: int) -> int:
        if self._buffer is None:
            self._buffer = DelimitedBuffer(b"\r\n\r\n", self._extra)
        buffer = self._buffer
        at = buffer.feed(data, at)
        if buffer.is_complete:
            self._buffer = None
            if _TRAILERS.fullmatch(buffer.text) is None:
                raise _malformed()
            self._charge_extra(len(buffer.text))
            self._next = _State.NOTHING
        elif buffer.has_stray_control():
            raise _malformed()
        elif buffer.is_over:
            raise _too_many_extra_bytes()
        return at

    def _charge_extra(self, size: int) -> None:
        self._extra -= size
        if self._extra < 0:
            raise _too_many_extra_bytes()


def _malformed() -> HttpProtocolError:
    return HttpProtocolError(400, "malformed chunked body")


def _too_many_extra_bytes() -> HttpProtocolError:
    return HttpProtocolError(431, f"chunk extensions and trailers exceed {MAX_EXTRA_BYTES} bytes")
