"""Bodies of multipart/form-data (RFC 7578), parsed while they arrive, without I/O."""

import enum
import re
from typing import NamedTuple

from inferry.domain.errors import InvalidRequest

MAX_PART_HEADER_BYTES = 8192
MAX_PARTS = 64

_BOUNDARY = re.compile(rb'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*form-data([^\r\n]*)", re.IGNORECASE)
_PARAMETER = re.compile(rb';[ \t]*(name|filename)="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)


class Part(NamedTuple):
    """The beginning of a part."""

    name: str
    filename: str | None


class _State(enum.Enum):
    DATA = "data"
    BOUNDARY = "boundary"
    HEADERS = "headers"
    END = "end"


def boundary_of(content_type: bytes) -> bytes:
    """The boundary in a content-type header. Raises InvalidRequest."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise InvalidRequest("the body must be multipart/form-data with a boundary")
    return found[1] or found[2]


class MultipartParser:
    """`feed` returns what has arrived: a `Part` where one begins, then bytes of its content."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # As if a line had ended before the body: the first delimiter is then like the others.
        self._buffer = bytearray(b"\r\n")
        self._state = _State.DATA
        self._parts = 0

    @property
    def is_complete(self) -> bool:
        return self._state is _State.END

    def feed(self, data: bytes) -> list[Part | bytes]:
        """Raises InvalidRequest."""
        buffer = self._buffer
        buffer += data
        found: list[Part | bytes] = []
        while self._step(buffer, found):
            pass
        return found

    def _step(self, buffer: bytearray, found: list[Part | bytes]) -> bool:
        """Take one piece from the buffer; False where it needs more data."""
        state = self._state
        if state is _State.DATA:
            end = buffer.find(self._delimiter)
            size = end if end >= 0 else len(buffer) - len(self._delimiter) + 1
            if size > 0:
                if self._parts:
                    found.append(bytes(buffer[:size]))
                del buffer[:size]
            if end < 0:
                return False
            del buffer[: len(self._delimiter)]
            self._state = _State.BOUNDARY
        elif state is _State.BOUNDARY:
            if len(buffer) < 2:
                return False
            follows = bytes(buffer[:2])
            if follows not in (b"--", b"\r\n"):
                raise _malformed()
            self._state = _State.END if follows == b"--" else _State.HEADERS
            del buffer[:2]
        elif state is _State.HEADERS:
            end = buffer.find(b"\r\n\r\n")
            if end > MAX_PART_HEADER_BYTES or (end < 0 and len(buffer) > MAX_PART_HEADER_BYTES):
                raise _malformed()
            if end < 0:
                return False
            found.append(self._begin_part(bytes(buffer[:end])))
            del buffer[: end + 4]
            self._state = _State.DATA
        else:
            buffer.clear()  # the epilogue has no meaning
            return False
        return True

    def _begin_part(self, headers: bytes) -> Part:
        self._parts += 1
        disposition = _DISPOSITION.search(headers)
        if disposition is None or self._parts > MAX_PARTS:
            raise _malformed()
        values = {name.lower(): value for name, value in _PARAMETER.findall(disposition[1])}
        if b"name" not in values:
            raise _malformed()
        filename = values.get(b"filename")
        return Part(_text(values[b"name"]), None if filename is None else _text(filename))


def _text(value: bytes) -> str:
    return re.sub(rb"\\(.)", rb"\1", value).decode("utf-8", "replace")


def _malformed() -> InvalidRequest:
    return InvalidRequest("the body is not valid multipart/form-data")
